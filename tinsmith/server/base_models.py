"""The base models that the engine serves, as it described them when it was ready."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from tinsmith.errors import EngineUnavailableError, NotFoundError, UserError
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.store.records import Checkpoint


class BaseModels:
    """Base models by name. They stay known while the engine is restarted, because the next one serves the same."""

    def __init__(self) -> None:
        self._by_name: dict[str, ModelFacts] = {}

    def replace(self, models: list[dict[str, Any]]) -> None:
        """Replace all by the models of a Ready message."""
        self._by_name = {facts.name: facts for facts in (ModelFacts(**model) for model in models)}

    def all(self) -> list[ModelFacts]:
        """All base models in the order of the configuration. Raises EngineUnavailableError before the first engine is ready."""
        if not self._by_name:
            raise EngineUnavailableError("the engine is still loading its models; send the request again")
        return list(self._by_name.values())

    @property
    def longest(self) -> int | None:
        """The longest context window of all; None before the first engine is ready."""
        return max((facts.max_context for facts in self._by_name.values()), default=None)

    def find(self, name: str, from_here: bool = False) -> ModelFacts:
        """The model that `NAME` or `NAME:suffix` means. Raises NotFoundError, or EngineUnavailableError as `all`.

        A client on this machine (`from_here`) that gives the directory of one is told its name.
        """
        known = {facts.name: facts for facts in self.all()}
        served = self.directories().get(name) if from_here and name not in known else None
        if served is not None:
            raise NotFoundError(f"base_model {name!r} is a directory; give the name under which it is served: {served!r}")
        return known[find_base(name, known)]

    def directories(self) -> dict[str, str]:
        """The names of the models that lie in directories of this machine, by directory."""
        return {facts.tokenizer_id: facts.name for facts in self._by_name.values() if Path(facts.tokenizer_id).is_absolute()}

    def name_of(self, asked: str) -> str:
        """The configured name of the model that `asked` means; `asked` itself if that model is not served (any more)."""
        with suppress(NotFoundError):
            return find_base(asked, self._by_name)
        return asked


def check_fits(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Raise UserError if the base model has another architecture than the checkpoint. The engine compares the sizes on loading."""
    if checkpoint.architecture != facts.architecture:
        raise UserError(
            f"base_model {facts.name!r} is of architecture {facts.architecture}, but {checkpoint.tinker_path} was saved for "
            f"{checkpoint.base_model!r}, of architecture {checkpoint.architecture}; name one of the same architecture"
        )
