"""What a machine can check of the documentation in the code: that it is there where a reader needs it."""

import ast
import dataclasses
import inspect
import re
import shlex
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import typer.main

from tests.invariants import invariants
from tests.test_architecture import RANKS
from tinsmith.cli import app
from tinsmith.config import CONFIG_VARIABLE, Config, settings
from tinsmith_rl.config import RlConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinsmith"
RL = ROOT / "rl" / "tinsmith_rl"
SHORT = 5
"""Lines of a method's body up to which its name and types may say enough."""

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

ARCHITECTURE = ROOT / "docs" / "architecture.md"
MOST_WORDS = {ARCHITECTURE: 2500} | dict.fromkeys((ROOT / "docs" / "design").glob("*.md"), 1200)
MOST_WORDS_OF_ALL = 22_000
"""How long a page, and all of docs/ together, may get: one that nobody reads in a sitting is not kept true either."""

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
"""Text, path and anchor of a link of Markdown."""

BLOCK = re.compile(r"^```.*$", re.MULTILINE)
"""What separates the text of a page from its blocks of code."""

OF_OTHERS = {"--help", "--only"}
"""Options that the pages name and no command declares: one that all have, and one of a recipe."""

SAYS_NOTHING = re.compile(r"(See|As) `?[\w.]+`?( \(`?[\w./]+`?\))?\.?|Nothing to do\.?")
"""A docstring that only sends the reader elsewhere."""

RIDDLE = re.compile(r"(What|How|Of|Where|As|By)\b")
MOST_RIDDLES = 120
"""Docstrings that begin with such a word and neither with a verb nor with what the thing is. May only fall."""

PLAIN = {
    "knob": "setting",
    "knobs": "settings",
    "whoever": "the client that",
    "taken for lost": "considered lost",
}
"""Words that have puzzled readers, and what to write instead."""

WITHOUT_UNIT = {
    "port",
    "max_aspect",
    "seed",
    "rank",
    "max_lora_rank",
    "temperature",
    "top_p",
    "learning_rate",
    "weight_decay",
}
WITHOUT_UNIT |= {
    "memory_share",
    "paged_state_share",
    "planned_rank",
    "grad_clip_norm",
    "kl_coefficient",
    "tis_cap",
    "success",
    "max_failed_share",
}
"""Numbers that have no unit: ports, ranks, seeds, ratios, rates, rewards."""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Path below the repository and syntax tree of every module that is not generated."""
    paths = [
        path for package in (PACKAGE, RL) for path in sorted(package.rglob("*.py")) if not path.name.endswith("_pb2.py")
    ]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Those of the modules, not the ones inside functions."""
    for path, module in modules():
        yield from ((path, node) for node in module.body if isinstance(node, ast.ClassDef))


def methods(class_: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in class_.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_protocol(class_: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith(("Protocol", "ABC")) for base in class_.bases)


def test_a_public_method_without_docstring_is_short_or_declared_by_a_protocol() -> None:
    """Ruff's D102 knows neither exception, so it is off."""
    declared = {method.name for _, class_ in classes() if is_protocol(class_) for method in methods(class_)}
    undocumented = [
        f"{path}:{method.lineno} {class_.name}.{method.name}"
        for path, class_ in classes()
        if not class_.name.startswith("_")
        for method in methods(class_)
        if not method.name.startswith("_") and ast.get_docstring(method) is None
        if is_protocol(class_) or (method.name not in declared and lines_of(method) > SHORT)
    ]
    assert not undocumented, "\n".join(undocumented)


def lines_of(method: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (method.body[-1].end_lineno or 0) - method.body[0].lineno + 1


def docstrings() -> Iterator[tuple[str, str]]:
    """Place and text of every docstring, including those of constants and fields."""
    for path, module in modules():
        for node in ast.walk(module):
            for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                ):
                    yield f"{path}:{statement.lineno}", inspect.cleandoc(statement.value.value)


def test_a_docstring_says_something_itself() -> None:
    empty = [f"{place}: {text}" for place, text in docstrings() if SAYS_NOTHING.fullmatch(text)]
    assert not empty, "\n".join(empty)


def test_docstrings_begin_with_a_verb_or_with_what_the_thing_is() -> None:
    riddles = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if RIDDLE.match(text)]
    assert len(riddles) <= MOST_RIDDLES, "\n".join(riddles)


def test_a_class_name_stands_once_in_each_package() -> None:
    places = defaultdict(list)
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[path.partition("/")[0], node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_code_and_pages_use_plain_words() -> None:
    files = [*PAGES, *(ROOT / path for path, _ in modules())]
    puzzling = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]!r}; write {PLAIN[match[0].lower()]!r} or the like"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in puzzling.finditer(line.replace("triton.knobs", ""))  # which is Triton's name for it
    ]
    assert not found, "\n".join(found)


def all_settings(section: Any) -> Iterator[tuple[str, type, Any]]:
    """Name, type and description of every setting in a section and in the sections in it."""
    hints = get_type_hints(type(section))
    for spec in dataclasses.fields(section):
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            yield from all_settings(value)
        else:
            yield spec.name, hints[spec.name], spec.metadata["info"]


def test_every_number_among_the_settings_has_a_unit() -> None:
    without = {
        name
        for root in (Config(), RlConfig())
        for name, kind, info in all_settings(root)
        if kind in (int, float) and not info.unit
    }
    assert without - WITHOUT_UNIT == set()


def test_the_help_of_every_setting_is_a_phrase() -> None:
    """It begins with a capital and has no full stop, like the others; a single word explains nothing."""
    settings = [(name, info.help) for root in (Config(), RlConfig()) for name, _, info in all_settings(root)]
    assert len(settings) > 100
    assert [(name, help) for name, help in settings if len(help.split()) < 2 or help.endswith(".")] == []


def test_files_that_the_pages_name_exist() -> None:
    """Paths in backquotes, from the root or from the package; `NAME` and `*` stand for anything."""
    roots = [ROOT, PACKAGE, PACKAGE / "sampling", RL]
    missing = []
    for page in PAGES:
        for path in re.findall(r"`((?:[\w.-]+/)+[\w*.-]+\.(?:py|md|yaml|toml))`", page.read_text(encoding="utf-8")):
            pattern = path.replace("NAME", "*")
            if not any(any(root.glob(pattern)) for root in [page.parent, *roots]):
                missing.append(f"{page.name}: {path}")
    assert not missing, "\n".join(missing)


def comments() -> Iterator[tuple[str, str]]:
    """Place and text of every comment of the modules."""
    for path, _ in modules():
        with (ROOT / path).open("rb") as file:
            found = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        yield from ((f"{path}:{token.start[0]}", token.string) for token in found)


def test_files_that_docstrings_and_comments_name_exist() -> None:
    """Seen from the module, its room or its package; and none sends the reader to where it stands itself."""
    missing = []
    for place, text in (*docstrings(), *comments()):
        module = ROOT / place.partition(":")[0]
        package = next(package for package in (PACKAGE, RL) if module.is_relative_to(package))
        for name in re.findall(r"(?<![\w./*-])[\w/]+\.py\b(?!:)", text):
            there = [
                root / name
                for root in (module.parent, module.parents[1], package, PACKAGE / "sampling", ROOT)
                if (root / name).is_file()
            ]
            if not there or there[0] == module:
                missing.append(f"{place}: {name}")
    assert not missing, "\n".join(missing)


def test_links_of_the_pages_lead_somewhere() -> None:
    """Also to the heading that follows a `#`. The text of a link to a module, if it is a name, is defined there."""
    links = [
        (page, *link)
        for page in PAGES
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not link[1].startswith("http")
    ]
    assert len(links) > 100
    assert [
        (page.name, text, path, anchor)
        for page, text, path, anchor in links
        if not leads_somewhere(page, text, path, anchor)
    ] == []


def leads_somewhere(page: Path, text: str, path: str, anchor: str) -> bool:
    target = page.parent / path if path else page
    if not target.exists() or (anchor and anchor not in anchors(target)):
        return False
    name = re.fullmatch(r"`(?:\w+\.)*(\w+)`", text)
    if target.suffix != ".py" or not name:
        return True
    return (
        re.search(rf"^ *(?:async )?(?:def|class) {name[1]}\b", target.read_text(encoding="utf-8"), re.MULTILINE)
        is not None
    )


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_the_architecture_names_the_rooms_in_their_order() -> None:
    named = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) == RANKS.keys()
    assert [RANKS[room] for room in named] == sorted(RANKS.values())


def test_pages_install_from_where_this_version_is_and_begin_with_what_says_most() -> None:
    """No package index has it. The SDK alone says nothing for minutes."""
    assert [
        page.name
        for page in PAGES
        if re.search(r"pip install\b.*\btinsmith\b *(\[|['\"`\n])", page.read_text(encoding="utf-8"))
    ] == []
    _, _, section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## My script hangs\n")
    assert section.startswith("\n```\ntinsmith ping ")


def test_no_page_is_longer_than_can_be_read() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert {page.name: words[page] for page, most in MOST_WORDS.items() if words[page] > most} == {}
    assert sum(count for page, count in words.items() if page.is_relative_to(ROOT / "docs")) <= MOST_WORDS_OF_ALL


def test_the_invariants_name_tests_that_exist() -> None:
    found = list(invariants())
    assert len(found) > 100
    assert [invariant for invariant in found if not invariant.promise.endswith(".")] == []
    assert [path for invariant in found for path in invariant.also if not (ROOT / path).is_file()] == []


def test_options_and_variables_that_readers_are_told_exist() -> None:
    """In README and docs/, outside of commands, which the next test parses."""
    commands = typer.main.get_group(app).commands.values()
    inner = [each for command in commands for each in getattr(command, "commands", {}).values()]
    options = {
        option
        for command in (*commands, *inner)
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    variables = {setting.variable for setting in settings()} | {CONFIG_VARIABLE}
    pages = [page for page in PAGES if page == PAGES[0] or page.is_relative_to(ROOT / "docs")]
    text = "".join("".join(BLOCK.split(page.read_text(encoding="utf-8"))[::2]) for page in pages)
    assert set(re.findall(r"(?<![\w=])--[a-z][a-z-]+", text)) - options == OF_OTHERS
    assert set(re.findall(r"TINSMITH_(?!TEST_)[A-Z_]*[A-Z]\b", text)) - variables == set()


def told_commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of every command of `tinsmith` in a block of code."""
    for page in PAGES:
        lines = "\n".join(BLOCK.split(page.read_text(encoding="utf-8"))[1::2]).replace("\\\n", " ").splitlines()
        for part in (part for line in lines for part in re.split(r"&&|\||  +", line.partition("#")[0])):
            if part.split()[:1] == ["tinsmith"]:
                yield page.name, shlex.split(part.removesuffix(" &"))[1:]


def test_commands_in_the_pages_can_be_given() -> None:
    """Command, arguments and options are there, and values are of their kind; what they do is tested elsewhere."""
    group = typer.main.get_group(app)
    told = list(told_commands())
    assert len(told) > 20
    wrong = []
    for page, words in told:
        if words == ["--version"]:
            continue
        command: Any = group  # of the library's own kinds
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        try:
            assert not hasattr(command, "commands")
            command.make_context("tinsmith", list(words))
        except (AssertionError, typer.BadParameter, typer.BadParameter.__base__) as error:  # type: ignore[misc]
            wrong.append(f"{page}: {' '.join(words)}: {error}")
    assert wrong == []


def test_the_table_of_clients_is_true() -> None:
    """Clients with a test are installed in the version that the table names, and the test is there and imports them."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    pins = ("constraints.txt", "constraints-recipes.txt")
    pinned = [pin for file in pins for pin in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    tested = [(name, version, ROOT / test) for name, version, _, _, test in rows if test]
    assert len(tested) > 3
    assert [name for name, version, _ in tested if f"{name}=={version}" not in pinned] == []
    assert [name for name, _, test in tested if name not in test.read_text(encoding="utf-8")] == []
    assert [
        name
        for name, _, _, result, test in rows
        if not test and not result.startswith(("not run", "does not", "run by hand"))
    ] == []
