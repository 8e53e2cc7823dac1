"""What `make docs` adds to the pages of `docs/`: README and others of the repository, and the generated reference.

MkDocs calls `on_files` and `on_page_markdown`. Pages lie elsewhere in the site than in the repository, so links are
turned; files of the repository that are no pages keep their names alone, because a site has no repository beside it.
"""

import ast
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client import CollectorRegistry

from tinsmith import errors
from tinsmith.cli import app
from tinsmith.config import Config, settings
from tinsmith.config_values import Setting
from tinsmith.observing import metrics
from tinsmith.server import replies
from tinsmith.server.app import create_app
from tinsmith.server.front import Front

ROOT = Path(__file__).parent.parent
BROUGHT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository outside docs/, and where they are in the site."""


SETTINGS = """# Settings

Every setting but `--base-model` has a default. It can be given in four places; each overrides those below it:

1. on the command line: `--kv-cache-gib 8`;
2. as an environment variable: `TINSMITH_KV_CACHE_GIB=8`. For an option that may be repeated, the name is in the plural
   and the value holds several words, quoted as in a shell: `TINSMITH_BASE_MODELS="tiny=/models/tiny Qwen/Qwen3-4B"`. An
   empty variable counts as not set;
3. in the YAML file of `--config` or `TINSMITH_CONFIG`, by section: `sampling: {kv_cache_gib: 8}`;
4. the default.

A name that is not a setting is refused in all of them, with a suggestion. A Kubernetes service named `tinsmith` adds
variables such as `TINSMITH_SERVICE_HOST` to every pod: set `enableServiceLinks: false` there."""
"""What stands above the tables of settings."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not have."""
    pages = {place: (ROOT / source).read_text(encoding="utf-8") for source, place in BROUGHT.items()}
    generated = {
        "commands": commands,
        "settings": all_settings,
        "http": routes,
        "metrics": all_metrics,
        "errors": all_errors,
        "python": python_api,
    }
    pages |= {f"reference/{name}.md": "\n".join(make()) + "\n" for name, make in generated.items()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where pages are in the site."""
    del config
    sources = {place: source for source, place in BROUGHT.items()}
    own = page.file.src_uri
    here = posixpath.dirname(sources.get(own, f"docs/{own}"))

    def turned(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return link[0]
        at = posixpath.normpath(posixpath.join(here, target))
        place = BROUGHT.get(at, at.removeprefix("docs/") if at.startswith("docs/") else "")
        if place and files.get_file_from_path(place):
            return f"[{text}]({posixpath.relpath(place, posixpath.dirname(own) or '.')}{anchor})"
        return text if "`" in text or text == at else f"{text} (`{at}`)"

    if own in sources:  # pictures, in HTML too
        markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]*)?\)", turned, markdown)


def commands() -> Iterator[str]:
    """The help of every command."""
    yield "# Commands"
    group = typer.main.get_group(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        for words, each in [(name, command)] if inner is None else [(f"{name} {key}", inner[key]) for key in inner]:
            context = each.make_context(f"tinsmith {words}", [], resilient_parsing=True)
            context.meta["tinsmith.everything"] = True
            yield f"\n## tinsmith {words}\n\n```\n{each.get_help(context)}\n```"


def all_settings() -> Iterator[str]:
    """Every setting with option, variable, what it takes and its default, by section."""
    yield SETTINGS
    sections: dict[str, list[Setting]] = {}
    for setting in settings():
        sections.setdefault(setting.path[0] if len(setting.path) > 1 else "", []).append(setting)
    for section, found in sections.items():
        yield f"\n## {section or 'Without a section'}\n\n| option, variable | takes | default | |\n|---|---|---|---|"
        for setting in found:
            takes = setting.accepted.replace("|", ", ") or "true, false"
            default = "" if setting.default in ("", []) else f"`{setting.default}`"
            unit = f" ({setting.info.unit})" if setting.info.unit else ""
            names = f"`{setting.option}` `{setting.variable}`"
            yield f"| {names} | {takes}{unit} | {default} | {_cell(setting.info.help)} |"


def routes() -> Iterator[str]:
    """Every route with what its function says, from the application's OpenAPI."""
    yield '# HTTP routes\n\nErrors are `{"detail": ...}` with a status of [the table of errors](errors.md).'
    front = cast("Front", SimpleNamespace(config=Config()))
    for path, methods in create_app(front).openapi()["paths"].items():
        for method, operation in methods.items():
            if path == "/{path}":
                continue  # all others, which are refused
            yield f"\n## {method.upper()} {path.replace('{', '&#123;')}\n\n{operation.get('description', '')}"
            for parameter in operation.get("parameters", []):
                needed = "" if parameter.get("required") else ", optional"
                yield f"\n- `{parameter['name']}` ({parameter['in']}{needed})"


def all_metrics() -> Iterator[str]:
    """Every metric that is declared, by the process that counts it."""
    yield "# Metrics\n\n`/metrics` tells them to Prometheus; counters end with `_total` there.\n"
    yield "| name | kind | labels | |\n|---|---|---|---|"
    registries = {id(each) for each in vars(metrics).values() if isinstance(each, CollectorRegistry)}
    assert len(registries) >= 3
    for each in vars(metrics).values():
        if hasattr(each, "_labelnames") and hasattr(each, "_documentation"):
            labels = ", ".join(each._labelnames)
            yield f"| `{each._name}` | {each._type} | {labels} | {_cell(each._documentation)} |"


def all_errors() -> Iterator[str]:
    """Every exception with the status that its replies have."""
    yield "# Errors\n\n| error | HTTP | |\n|---|---|---|"
    kinds = [each for module in (errors, replies) for each in vars(module).values() if inspect.isclass(each)]
    for kind in dict.fromkeys(kind for kind in kinds if issubclass(kind, errors.TinsmithError)):
        status = next(number for base, number in replies._STATUS if issubclass(kind, base))
        yield f"| `{kind.__name__}` | {status} | {_cell(inspect.getdoc(kind) or '')} |"


def python_api() -> Iterator[str]:
    """What the modules of `tinsmith_rl` define for others, with signatures and docstrings."""
    yield "# Python: tinsmith_rl"
    for path in sorted((ROOT / "rl" / "tinsmith_rl").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        public = [
            each for each in module.body if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        public = [each for each in public if not each.name.startswith("_") and ast.get_docstring(each)]
        if path.name.startswith("__") or not public:
            continue
        yield f"\n## tinsmith_rl.{path.stem}\n\n{ast.get_docstring(module) or ''}"
        for each in public:
            given = f"({ast.unparse(each.args)})" if not isinstance(each, ast.ClassDef) else ""
            yield f"\n### {each.name}\n\n```python\n{each.name}{given}\n```\n\n{ast.get_docstring(each)}"


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
