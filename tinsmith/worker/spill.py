"""Snapshots on disk, where they outlive the memory and this process: written by a thread of its own, or by others."""

import json
import shutil
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import WeightsRef
from tinsmith.sampling.sampler import ref_of
from tinsmith.store.disk import make_directory
from tinsmith.store.files import SNAPSHOT_FILE, WRITING_PREFIX, put_in_place
from tinsmith.training.checkpoint import About, SavedState, write_state

Key = tuple[str, str]
"""Name of the base model, and the id of a snapshot or the path of a checkpoint."""


@dataclass(frozen=True)
class Written:
    """Weights that were written to disk."""

    directory: Path
    ref: WeightsRef
    size: int
    """Bytes on the disk."""


@dataclass(frozen=True)
class _Leaving:
    """Weights on their way."""

    key: Key
    about: About
    weights: Weights


class Spill:
    """Snapshots on disk, by key, written by a thread of its own, one at a time.

    Until one is written it stays in memory.
    """

    def __init__(self, directory: Path) -> None:
        """Take over the snapshots that an earlier worker of this engine has left in the directory, oldest first."""
        self.directory = directory
        make_directory(directory)
        self._thread = ThreadPoolExecutor(1, "spill")
        self._lock = threading.Lock()
        self._leaving: _Leaving | None = None
        self._writing: Future[None] | None = None
        self._written: dict[Key, Written] = {}
        for found in sorted(directory.iterdir(), key=lambda each: each.stat().st_mtime):
            if found.name.startswith(WRITING_PREFIX):
                shutil.rmtree(found)
            else:
                names = json.loads((found / SNAPSHOT_FILE).read_text())
                key: Key = (names["base_model"], names["snapshot_id"])
                self.drop(key)  # an earlier state of the same inflight weights
                self._written[key] = Written(found, WeightsRef(**names["ref"]), _size(found))

    def put(self, key: Key, about: About, weights: Weights) -> None:
        """Start to write weights, when the ones before are on the disk, unless they are there already.

        Raises TinsmithError if the disk did not take the ones before: they are kept, and tried again.
        """
        if self.find(key) is None:
            self.settle()
            self._start(_Leaving(key, about, weights))

    def find(self, key: Key) -> Weights | Written | None:
        """Return the weights if still in memory, or where they are on disk; None if they were never put here."""
        with self._lock:
            if self._leaving is not None and self._leaving.key == key:
                return self._leaving.weights
            return self._written.get(key)

    def refs(self) -> dict[Key, WeightsRef]:
        """Return the identity of each snapshot that is on the disk, oldest first."""
        return {key: written.ref for key, written in self._written.items()}

    def take(self, key: Key, written: Written, wanted: bool) -> None:
        """Take over what `write` has written; delete it unless it is `wanted` and not here already."""
        if wanted and self.find(key) is None:
            self._written[key] = written
        else:
            shutil.rmtree(written.directory, ignore_errors=True)

    def keys(self) -> list[Key]:
        with self._lock:
            return [*self._written, *([self._leaving.key] if self._leaving is not None else [])]

    def sizes(self) -> dict[Key, int]:
        """Bytes of each snapshot that is on the disk or on its way."""
        with self._lock:
            leaving = {} if self._leaving is None else {self._leaving.key: self._leaving.weights.nbytes}
            return {key: written.size for key, written in self._written.items()} | leaving

    def drop(self, key: Key) -> None:
        """Forget a snapshot, if it is here."""
        leaving = self._leaving
        if leaving is not None and leaving.key == key:
            self._thread.submit(self._forget_leaving).result()  # when it has been written, or has failed
            self._writing = None
        written = self._written.pop(key, None)
        if written is not None:
            shutil.rmtree(written.directory, ignore_errors=True)  # it may have been deleted from outside

    def settle(self) -> None:
        """Wait until all is on the disk. Raises what went wrong, which is tried again."""
        if self._writing is None:
            return
        # A frame of ours that named the error would keep it, and with it the weights of all its callers
        with ExitStack() as then:
            then.callback(self._start_again)
            self._writing.result()

    def _start_again(self) -> None:
        """Write what was not written; nothing if all was."""
        if self._leaving is not None:
            self._start(self._leaving)

    def _start(self, leaving: _Leaving) -> None:
        self._leaving = leaving
        self._writing = self._thread.submit(self._write, leaving)

    def _write(self, leaving: _Leaving) -> None:
        written = self.write(leaving.key, leaving.about, leaving.weights)
        with self._lock:
            self._written[leaving.key] = written
            self._leaving = None

    def write(self, key: Key, about: About, weights: Weights) -> Written:
        """Write a snapshot, completely or not at all; any thread may do this, and `take` lets it be found."""
        name = uuid.uuid4().hex
        writing, directory = self.directory / f"{WRITING_PREFIX}{name}", self.directory / name
        ref = ref_of(weights, key[0])
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, writing, ignore_errors=True)  # it may not even have been made
            write_state(SavedState(about, dict(weights.named_tensors())), writing)
            (writing / SNAPSHOT_FILE).write_text(
                json.dumps({"base_model": key[0], "snapshot_id": key[1], "ref": asdict(ref)})
            )
            size = _size(writing)
            put_in_place(writing, directory)
            undo.pop_all()
        return Written(directory, ref, size)

    def _forget_leaving(self) -> None:
        self._leaving = None


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
