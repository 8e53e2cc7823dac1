"""Chat templates on the tiny tokenizer."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.rl.scripted import THINKING, tokenizer
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith_rl.chat import ChatTemplate

collect_ignore = [f"test_{name}.py" for name in ("tinker_cookbook", "verifiers") if not find_spec(name)]


@pytest.fixture(scope="session")
def make_template(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], ChatTemplate]:
    """A chat template by its Jinja text; None is the tiny model's own."""
    directory = tmp_path_factory.mktemp("tokenizer")
    return lambda template: ChatTemplate.for_tokenizer(tokenizer(directory), template)


@pytest.fixture(scope="session")
def plain(make_template: Callable[[str | None], ChatTemplate]) -> ChatTemplate:
    """Extends by suffix."""
    return make_template(None)


@pytest.fixture(scope="session")
def thinking(make_template: Callable[[str | None], ChatTemplate]) -> ChatTemplate:
    """Drops earlier thoughts."""
    return make_template(THINKING)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the models `tiny` and `tiny-vl`."""
    directory = tmp_path_factory.mktemp("rl-server")
    options = ["--kv-cache-gib", "0.1", "--max-context", "2048"]
    write_tiny_model("qwen3", directory / "tiny")
    write_tiny_model("qwen3-vl", directory / "tiny-vl")
    for name in ("tiny", "tiny-vl"):
        options += ["--base-model", f"{name}={directory / name}"]
    with serving(directory, *options) as server:
        server.wait_for_health()
        yield server.url
