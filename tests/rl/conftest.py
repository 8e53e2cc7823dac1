"""Chat templates on the tiny tokenizer."""

from collections.abc import Callable

import pytest

from tests.rl.scripted import THINKING, tokenizer
from tinsmith.rl.chat import ChatTemplate


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
