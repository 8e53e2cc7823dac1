"""The base models that the engine serves, as its Ready message described them."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinsmith.errors import EngineUnavailableError, NotFoundError, UserError
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.store.records import Checkpoint


class BaseModels:
    """Base models by name. They stay known while the engine is restarted: the next one serves the same."""

    def __init__(self) -> None:
        self._by_name: dict[str, ModelFacts] = {}
        self._changed = asyncio.Event()

    def replace(self, models: list[dict[str, Any]]) -> None:
        self._by_name = {facts.name: facts for facts in (ModelFacts(**model) for model in models)}
        self._changed.set()
        self._changed = asyncio.Event()

    async def others_than(self, known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Wait until they are others than `known`, and return them as `replace` takes them."""
        while (models := [facts.to_dict() for facts in self._by_name.values()]) == known:
            await self._changed.wait()
        return models

    def all(self) -> list[ModelFacts]:
        """All, in the order of the configuration. Raises EngineUnavailableError before an engine was ready."""
        if not self._by_name:
            raise EngineUnavailableError("the engine is still loading its models; send the request again")
        return list(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Their names; of none before an engine was ready."""
        return list(self._by_name)

    @property
    def longest(self) -> int | None:
        """The longest context window; None before an engine was ready."""
        return max((facts.max_context for facts in self._by_name.values()), default=None)

    def find(self, name: str, from_here: bool = False) -> ModelFacts:
        """The model that `NAME` or `NAME:suffix` means. Raises NotFoundError, or EngineUnavailableError as `all`.

        A client on this machine (`from_here`) that gives a model's directory is told its name.
        """
        known = {facts.name: facts for facts in self.all()}
        served = self.directories().get(name) if from_here and name not in known else None
        if served is not None:
            raise NotFoundError(
                f"base_model {name!r} is a directory; give the name under which it is served: {served!r}"
            )
        return known[find_base(name, known)]

    def directories(self) -> dict[str, str]:
        """Names by directory, of models that lie in one."""
        return {
            facts.tokenizer_id: facts.name for facts in self._by_name.values() if Path(facts.tokenizer_id).is_absolute()
        }

    def name_of(self, asked: str) -> str:
        """The configured name of the model that `asked` means; `asked` itself if it is not served."""
        with suppress(NotFoundError):
            return find_base(asked, self._by_name)
        return asked


def check_fits(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Raise UserError if the checkpoint is of another architecture. The engine compares sizes when it loads."""
    if checkpoint.architecture != facts.architecture:
        raise UserError(
            f"base_model {facts.name!r} is of architecture {facts.architecture}, but {checkpoint.tinker_path} was "
            f"saved for {checkpoint.base_model!r}, of architecture {checkpoint.architecture}; "
            "name one of the same architecture"
        )
