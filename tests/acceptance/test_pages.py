"""What README and the pages of docs/ tell people to run: shell commands and Python, against a server with tiny models.

The server has the tiny models under the very names that the pages use. A page's commands run in their order, in one
directory. Those that need a GPU, the Hub, other programs or minutes do not run: `test_documentation.py` parses the ones
of `tinsmith`, and here files, targets, extras and configurations that the others name must exist.
"""

import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.conftest import API_KEY, connect, ready
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.running import START_S, Server, tinsmith_here
from tinsmith.models.tiny import write_tiny_model
from tinsmith_rl.config import from_tree, load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

TEXT, VISION = "Qwen/Qwen3.5-4B", "Qwen/Qwen3-VL-4B-Instruct"
"""Names under which the pages' snippets find a text model and one that takes images."""

PARSED = {"serve", "warm", "view", "rl", "eval", "push-hf"}
"""Commands of `tinsmith` that run until they are stopped, for minutes, or with the Hub. Other tests run them."""

ELSEWHERE = {
    "git": "changes the clone, or makes another",
    "cd": "leads into it",
    "ray": "starts a cluster; tests/distributed has one",
    "vllm": "needs a GPU",
    "llama-cli": "no package has it; tests/commands/test_push.py reads exports with the library",
    "ollama": "no package has it",
    ".": "sets up a shell",
}
"""Programs that do not run here, and why."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language; those without a name are for a shell."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removesuffix(" &"), comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, language)]


@dataclass
class Place:
    """Where a page's commands run."""

    server: Server
    model: Path
    """A tiny text model."""
    run: str
    """The id of a run that has saved checkpoints named NAME."""
    session: str
    own: Path
    """A directory for what belongs to this page alone."""

    def words(self, words: list[str]) -> list[str]:
        """The words with what exists here in place of what the page calls it."""
        known = {"http://127.0.0.1:8000": self.server.url, "RUN_ID": self.run, "MODEL_ID": self.run}
        known |= {"SESSION_ID": self.session, "examples/": f"{ROOT}/examples/"}
        return [re.sub("|".join(map(re.escape, known)), lambda found: known[found[0]], word) for word in words]

    def model_in(self, words: list[str]) -> list[str]:
        """The words of a command that reads a model, which it finds here."""
        if words[0] == "plan":
            return [words[0], str(self.model), *words[2:]]
        return [f"{word}={self.model}" if before == "--base-model" else word for before, word in pairs(words)]


def pairs(words: list[str]) -> list[tuple[str, str]]:
    """Each word with the one before it."""
    return list(zip(["", *words], words, strict=False))


@pytest.fixture(scope="module")
def model(family_dir: Callable[[str], Path]) -> Path:
    return family_dir("qwen3")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("pages")
    write_tiny_model("qwen3-vl", directory / "vision")
    served = ["--base-model", f"{TEXT}={model}", "--base-model", f"{VISION}={directory / 'vision'}"]
    with ready(directory, *served, "--kv-cache-gib", "0.1") as running:
        yield running


@pytest.fixture(scope="module")
def saved(server: Server) -> tuple[str, str]:
    """The ids of a run that has saved checkpoints named NAME, and of its session."""
    with connect(server) as service:
        client = train(service, TEXT)
        client.forward_backward([datum(text_input(0, 9))], "cross_entropy")
        client.optim_step(RAW_STEP).result()
        client.save_state("NAME").result()
        client.save_weights_for_sampler("NAME").result()
        return client.model_id, service.holder.get_session_id()


@pytest.fixture
def place(
    server: Server, model: Path, saved: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINSMITH_DATA_DIR", str(server.data_dir))
    return Place(server, model, *saved, tmp_path / "own")


@pytest.mark.parametrize("page", pages_with(""))
def test_the_commands_of_a_page_succeed(page: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "team.md":  # with a key in it, the server would ask all others for one
        monkeypatch.setenv("TINSMITH_DATA_DIR", str(place.own))
    for text in blocks(page, ""):
        for words in commands(text):
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            run(place.words(words), place, monkeypatch)


def run(words: list[str], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command, or look whether what it names is there. Raises AssertionError if it fails or nobody knows it."""
    program = words[0].rpartition("/")[2]
    if program == "export":
        for name, _, value in (word.partition("=") for word in words[1:]):
            monkeypatch.setenv(name, value)
    elif program == "tinsmith":
        run_tinsmith(words[1:], place)
    elif program == "tinker":
        run_tinker(words[1:])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), words
    elif program == "pip":
        require_project(words[-1])
    elif program == "python":
        assert words[2] == "venv" or words[2].removeprefix("tinker_cookbook.recipes.") in recipes_that_are_tested(), (
            words
        )
    elif program == "tinsmith-rl":
        configuration = Path(words[-1])
        assert (
            load(configuration).training.steps if configuration.is_absolute() else configuration.name == "colours.yaml"
        )
    else:
        assert program in ELSEWHERE, f"no test runs {shlex.join(words)}"


def run_tinsmith(words: list[str], place: Place) -> None:
    if words[0] in PARSED:
        return
    if words[0] in ("plan", "doctor", "import"):
        words = place.model_in(words)
    if words[0] == "doctor":  # the server has its data directory and port
        words = [*words, "--data-dir", str(place.own), "--port", "0"]
    if words[0] == "status":
        words = [*words, place.server.url]
    done = tinsmith_here(*words)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    if words[0] == "export":
        assert (Path(words[2]) / "README.md").is_file()


def run_tinker(words: list[str]) -> None:
    program = [sys.executable, "-m", "tinker.cli", *words]
    done = subprocess.run(program, input="y\n", capture_output=True, text=True, check=False, timeout=START_S)
    # The SDK's HTTP library may abort Python 3.11 at its end, when all is done and printed.
    assert done.returncode in (0, -signal.SIGABRT), (words, done.stdout, done.stderr)


def require_project(named: str) -> None:
    """Raise AssertionError unless this project, or the one in rl/, has what pip is told to install of it."""
    found = re.fullmatch(r"\.(?:/(\w+))?(?:\[([\w,-]+)\])?", named)
    assert found, named
    project = tomllib.loads((ROOT / (found[1] or ".") / "pyproject.toml").read_text())["project"]
    assert set((found[2] or "").split(",")) - {""} <= project["optional-dependencies"].keys()


def recipes_that_are_tested() -> str:
    return "".join(path.read_text() for path in (ROOT / "tests" / "recipes").glob("*.py"))


def test_blocks_without_a_name_are_shell() -> None:
    """A shell reads all of them, and each page's are known to `commands`."""
    text = "\n".join(text for page in PAGES for text in blocks(page, ""))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(commands(text))) > 50


def test_every_snippet_of_python_is_run_by_a_test() -> None:
    """By those below, which name their pages."""
    assert {
        page.relative_to(ROOT).as_posix(): len(blocks(page, "python")) for page in PAGES if blocks(page, "python")
    } == {
        "docs/endpoints.md": 1,
        "docs/how-to/vlm.md": 1,
        "docs/rl.md": 1,
        "docs/start/first-model.md": 1,
        "docs/start/first-rl-run.md": 1,
    }


def executed(page: str, server: Server) -> dict[str, Any]:
    """The names that the only snippet of a page has made, run against this server."""
    (code,) = blocks(ROOT / page, "python")
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), page, "exec"), names)
    return names


def test_the_first_snippet_trains_samples_and_leaves_no_model_loaded(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    names = executed("docs/start/first-model.md", server)
    printed = capsys.readouterr().out.splitlines()
    losses = [float(loss) for loss in re.findall(r"'loss:sum': ([\d.]+)", "\n".join(printed[:10]))]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"\[\d+(, \d+){0,7}\]", printed[10])
    # The engine unloads beside the answer that the session is finished. Other tests' models may come and stay.
    server.wait_for_status(
        lambda status: names["model"].model_id not in [model["model_id"] for model in status["models"]]
    )


def test_the_snippet_with_an_image_is_answered(server: Server) -> None:
    sequence = executed("docs/how-to/vlm.md", server)["answer"].sequences[0]
    assert 1 <= len(sequence.tokens) <= 8


def test_the_snippet_of_an_application_is_answered(server: Server) -> None:
    answer = executed("docs/endpoints.md", server)["answer"]
    assert answer.model == TEXT
    assert answer.usage.completion_tokens > 0


def test_the_example_of_an_environment_has_answers_that_are_right(server: Server, tmp_path: Path) -> None:
    """`make test-rl` trains on it."""
    from tinsmith_rl.env import Prompt

    page = "docs/start/first-rl-run.md"
    environment = executed(page, server)["Colours"]()
    messages, _ = environment.init(Prompt(seed=1))
    assert len(messages) == 1
    step = environment.step(environment.demonstrate())
    assert (step.reward, step.done) == (1.0, True)
    (settings,) = blocks(ROOT / page, "yaml")
    assert from_tree(yaml.safe_load(settings)).training.steps == 20


def test_the_snippet_that_starts_a_run_asks_for_its_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running it takes minutes: it gets as far as its configuration, which is not there."""
    from tinsmith_rl.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape("run.yaml")):
        executed("docs/rl.md", server)
