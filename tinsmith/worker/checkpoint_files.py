"""Reads and writes checkpoint files, in threads beside the device.

The engine gives a directory that nobody else writes to, and makes the checkpoint exist with its row when the files are
complete.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tinsmith.errors import TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place
from tinsmith.protocol.work import CallFailed, DropFiles, ExportModel, FinishSave, PartWritten, SaveModel, type_of
from tinsmith.store.disk import sync
from tinsmith.store.files import OPTIMIZER_FILE, CheckpointFiles, deleted_at_last
from tinsmith.store.manifest import read_manifest, verify_files, write_manifest
from tinsmith.store.pieces import Told, check_pieces, write_pieces
from tinsmith.store.records import Checkpoint
from tinsmith.training.checkpoint import has_moments, read_about
from tinsmith.training.parallel.checkpoint_shard import CheckpointShard
from tinsmith.worker.background import Background
from tinsmith.worker.exports import export_files, parse_recipients


def write_files(
    files: CheckpointFiles, row: Mapping[str, Any], write: Callable[[Path], None], joint: bool = False
) -> dict[str, Any]:
    """Let `write` fill the directory of a checkpoint; returns the fields of its row that only the files tell.

    With `joint` all workers have filled it (`CheckpointFiles.joint`), and `write` checks it. When this returns, all is
    on the disk or in the object store; otherwise it raises TinsmithError, and there is nothing.
    """
    with refused_by_disk(row["tinker_path"]):
        with (files.joined if joint else files.written)(row["directory"]) as directory:
            write(directory)
            about = read_about(directory) if row["kind"] != "external" else None
            sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
            found: dict[str, Any] = {
                "has_optimizer": about is not None and has_moments(directory),
                "size_bytes": sum(sizes),
            }
            write_manifest(directory, Checkpoint(**row, **found))
        return found


@contextmanager
def refused_by_disk(tinker_path: str, who: str = "") -> Iterator[None]:
    """Turn a disk's refusal of a checkpoint into a TinsmithError; `who` is the worker that it concerns alone."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        raise TinsmithError(f"{who}{tinker_path} could not be written: {error}; see to that and save again") from error


@contextmanager
def opened_files(files: CheckpointFiles, place: str, optimizer: bool) -> Iterator[Path]:
    """Yield a directory with the verified files of a checkpoint, to read while the body runs.

    Without `optimizer` the optimizer's file is not checked and must not be read. Raises TinsmithError naming a file
    that is damaged.
    """
    with files.fetched(place) as directory:
        shown = files.shown(place)
        written = read_manifest(directory, shown)
        verify_files(written, directory, shown, [name for name in written.files if optimizer or name != OPTIMIZER_FILE])
        yield directory


# Writes this worker's part of a checkpoint whose weights are sharded over all workers.
#
#   copy of its part ─▶ a thread writes it ─▶ PartWritten ─▶ FinishSave, to one ─▶ a thread makes a checkpoint ─▶ Answer
#
# Only the engine waits for all. As long as one may still write, nothing is taken for complete, and nothing is deleted.

Save = SaveModel | ExportModel
AnswerWith = Callable[[Save, Callable[[], dict[str, Any]]], None]


@dataclass(eq=False)
class JointSaves:
    """The saves that this worker has a part of.

    `disk` runs what touches files; `answer` lets it run work whose result answers a call.
    """

    files: CheckpointFiles
    disk: Background
    send: Callable[[Message], None]
    place: Place
    answer: AnswerWith
    begun: dict[int, Save] = field(default_factory=dict)
    """Saves by number that this worker finishes when all have written their parts."""

    def write(self, message: Save, part: CheckpointShard) -> None:
        """Let a thread write this worker's part, which is told when it is on the disk."""
        if self.place.writes(message.model_id):
            self.begun[message.number] = message
        self.disk.run(partial(self._write, message, part), partial(self._written, message))

    def _write(self, message: Save, part: CheckpointShard) -> list[tuple[str, int, int, int]]:
        row = message.checkpoint
        with refused_by_disk(row["tinker_path"], f"{self.place.name}: "):
            return write_pieces(self.files.joint(row["directory"]), part.pieces(), between_hosts=bool(self.place.host))

    def _written(self, message: Save, ended: "Future[list[tuple[str, int, int, int]]]") -> None:
        with failing_into(lambda error: self.send(CallFailed(message.number, type_of(error), str(error)))):
            self.send(PartWritten(message.number, ended.result()))

    def finish(self, message: FinishSave) -> None:
        """Make a checkpoint of what all have written, or delete it if one has failed."""
        save = self.begun.pop(message.number, None)
        if message.error_type:
            failed = CallFailed(message.number, message.error_type, message.error)
            self.disk.run(partial(self.files.remove, message.directory), lambda _: self.send(failed))
            return
        assert save is not None  # this worker has told of its part
        self.answer(save, partial(self._checkpoint, save, message.pieces))

    def _checkpoint(self, save: Save, told: Told) -> dict[str, Any]:
        """Make the checkpoint of a save whose parts are all written; return the row fields that only the files tell."""
        row = save.checkpoint
        if isinstance(save, SaveModel):
            return write_files(self.files, row, partial(_require_whole, told=told), joint=True)

        def write(directory: Path) -> None:
            _require_whole(written, told)
            export_files(written, directory, parse_recipients(save.recipients))
            # Before the export is there, and for good: it may be encrypted, and this is not.
            shutil.rmtree(written)
            sync(written.parent)

        with deleted_at_last(self.files.joint(row["directory"])) as written:  # also if nothing was written
            return write_files(self.files, row, write)

    def drop(self, message: DropFiles) -> None:
        """Delete what is left of saves that ended with their workers, or a day later if it cannot be deleted now."""
        for directory in message.directories:
            self.disk.run(partial(self.files.remove, directory), _ignored)


def _require_whole(directory: Path, told: Told) -> None:
    """Raise TinsmithError or SafetensorError unless files hold all that was told of and all their headers name."""
    check_pieces(directory, told)
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt"):
            pass


def _ignored(ended: "Future[None]") -> None:
    """Ignore whether it could be deleted."""
