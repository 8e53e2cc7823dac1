"""The store for the event loop. One thread does all writes; commands that arrive during a write share the next one.

So do polls that look for outcomes: threads that read for each would keep the event loop from its lock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tinsmith.errors import StoreUnavailableError, reported
from tinsmith.store.records import NewCommand, Outcome
from tinsmith.store.store import Store

_READ_THREADS = 4

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Stored(Protocol):
    """Awaitable access to a Store, which may be written in another process than it is read."""

    def read(
        self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Coroutine[Any, Any, Result]:
        """Read; raises as the method."""
        ...

    def write(
        self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Coroutine[Any, Any, Result]:
        """Write; raises as the method."""
        ...


class AsyncStore:
    """Awaitable access to a Store."""

    def __init__(self, store: Store) -> None:
        """The caller closes `store`, after `close`."""
        self._store = store
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._image_writer = ThreadPoolExecutor(1, "image-writer")
        self._readers = ThreadPoolExecutor(_READ_THREADS, "store-reader")
        self._open_group: tuple[list[NewCommand], asyncio.Task[list[bool]]] | None = None
        """Commands of the next transaction, and the task that commits it."""
        self._turn = asyncio.Lock()
        self._open_look: tuple[list[str], asyncio.Task[dict[str, tuple[str, Outcome | None]]]] | None = None
        """Operations that are looked up next, and the task that does it."""
        self._look_turn = asyncio.Lock()

    async def read(
        self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """A reading method of Store, e.g. `read(Store.model, model_id)`."""
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: method(self._store, *args, **kwargs)
        )

    async def write(
        self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        return await asyncio.get_running_loop().run_in_executor(
            self._writer, lambda: method(self._store, *args, **kwargs)
        )

    async def append(self, command: NewCommand) -> bool:
        """Append a command, after its images. Its model must exist or come with it; returns as `Store.append`."""
        if command.images:
            await asyncio.get_running_loop().run_in_executor(
                self._image_writer, self._store.blobs.write, command.images
            )
        if self._open_group is None:
            group: list[NewCommand] = []
            self._open_group = group, asyncio.create_task(self._commit(group))
        commands, committed = self._open_group
        commands.append(command)
        position = len(commands) - 1
        # Shielded: a client that goes away must not take the others' commands with it.
        return (await asyncio.shield(committed))[position]

    async def _commit(self, group: list[NewCommand]) -> list[bool]:
        async with self._turn:
            self._open_group = None  # what arrives from now on is for the next group
            return await self.write(Store.append, group)

    async def look_up(self, request_id: str) -> tuple[str, Outcome | None] | None:
        """Status of an operation, and outcome if it has one; None if it is not in the log."""
        if self._open_look is None:
            group: list[str] = []
            self._open_look = group, asyncio.create_task(self._look_up_all(group))
        asked, found = self._open_look
        asked.append(request_id)
        return (await asyncio.shield(found)).get(request_id)

    async def _look_up_all(self, group: list[str]) -> dict[str, tuple[str, Outcome | None]]:
        async with self._look_turn:
            self._open_look = None
            return await self.read(Store.looked_up, group)

    def missing(self) -> str:
        """Say how the database's file has left its directory; empty if it has not. Takes microseconds."""
        found: list[str] = []
        with reported(StoreUnavailableError, lambda error: found.append(str(error))):
            self._store.require_there()
        return "".join(found)

    def close(self) -> None:
        """Wait for what is being written, and end the threads."""
        self._image_writer.shutdown()
        self._writer.shutdown()
        self._readers.shutdown()
