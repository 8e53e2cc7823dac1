"""The store for the event loop. Writes happen one after another in one thread; commands that arrive meanwhile share a transaction."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from tinsmith.store.records import NewCommand
from tinsmith.store.store import Store

_READ_THREADS = 4

Params = ParamSpec("Params")
Result = TypeVar("Result")


class _Group:
    """Commands that will be appended in one transaction."""

    def __init__(self) -> None:
        self.commands: list[NewCommand] = []
        self.committed: asyncio.Task[list[bool]] | None = None


class AsyncStore:
    """Awaitable access to a Store."""

    def __init__(self, store: Store) -> None:
        """Use `store`, which the caller closes after `close`."""
        self._store = store
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(_READ_THREADS, "store-reader")
        self._open_group: _Group | None = None
        self._turn = asyncio.Lock()

    async def read(self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """A reading method of Store, e.g. `read(Store.model, model_id)`."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: method(self._store, *args, **kwargs))

    async def write(self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """A writing method of Store."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, lambda: method(self._store, *args, **kwargs))

    async def append(self, command: NewCommand) -> bool:
        """Append one command; see Store.append. Its model must exist or come with it."""
        group = self._open_group
        if group is None:
            group = self._open_group = _Group()
            group.committed = asyncio.create_task(self._commit(group))
        position = len(group.commands)
        group.commands.append(command)
        assert group.committed is not None
        # Shielded: a client that goes away must not take the others' commands with it.
        return (await asyncio.shield(group.committed))[position]

    async def _commit(self, group: _Group) -> list[bool]:
        async with self._turn:
            self._open_group = None  # what arrives from now on is for the next group
            return await self.write(Store.append, group.commands)

    def close(self) -> None:
        """Wait for what is being written and end the threads."""
        self._writer.shutdown()
        self._readers.shutdown()
