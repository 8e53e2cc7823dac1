"""What tests of the local sampler share: a model of each kind, and states that show whether they are the right ones."""

from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.models.base import BaseModel
from tinsmith.sampling.local.states import StateSlots


@pytest.fixture(params=["qwen3", "qwen3_5"])
def any_base(request: pytest.FixtureRequest, family_base: Callable[[str], BaseModel]) -> BaseModel:
    """A model that keeps keys and values of all tokens, and one that keeps states too."""
    return family_base(request.param)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of states are full of NaN whenever they are free, so that one that is stale, foreign or computed twice
    shows."""

    def spoil(states: StateSlots) -> None:
        if states.free:
            states.inputs[:, states.free] = float("nan")
            states.memory[:, states.free] = float("nan")

    for name in ("clear", "give_back", "forget"):
        inner = getattr(StateSlots, name)

        def outer(states: StateSlots, *arguments: Any, inner: Callable[..., Any] = inner) -> Any:
            result = inner(states, *arguments)
            spoil(states)
            return result

        monkeypatch.setattr(StateSlots, name, outer)
