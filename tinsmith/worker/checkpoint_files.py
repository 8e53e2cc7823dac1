"""Reads and writes checkpoint files, in threads beside the device.

The engine gives a directory that nobody else writes to, and makes the checkpoint exist with its row when the files are complete.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tinsmith.errors import TinsmithError
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import read_manifest, verify_files, write_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.training.checkpoint import OPTIMIZER_FILE, has_moments, read_about


def write_files(files: CheckpointFiles, row: Mapping[str, Any], write: Callable[[Path], None], joint: bool = False) -> dict[str, Any]:
    """Let `write` fill the directory of a checkpoint; returns the fields of its row that only the files tell.

    With `joint` all workers have filled it (`CheckpointFiles.joint`), and `write` checks it. When this returns, all is on the disk or in
    the object store; otherwise it raises TinsmithError, and there is nothing.
    """
    with refused_by_disk(row["tinker_path"]):
        with (files.joined if joint else files.written)(row["directory"]) as directory:
            write(directory)
            about = read_about(directory) if row["kind"] != "external" else None
            sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
            found: dict[str, Any] = {"has_optimizer": about is not None and has_moments(directory), "size_bytes": sum(sizes)}
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

    Without `optimizer` the optimizer's file is not checked and must not be read. Raises TinsmithError naming a file that is damaged.
    """
    with files.fetched(place) as directory:
        shown = files.shown(place)
        written = read_manifest(directory, shown)
        verify_files(written, directory, shown, [name for name in written.files if optimizer or name != OPTIMIZER_FILE])
        yield directory
