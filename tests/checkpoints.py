"""Saving and reading checkpoints as engine and worker do it together, without their processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.engine.checkpoints import CheckpointRows
from tinsmith.models.full import Weights
from tinsmith.protocol.work import SaveModel
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import write_state
from tinsmith.wire.paths import CheckpointKind, CheckpointPath
from tinsmith.worker.checkpoint_files import opened_files, write_files
from tinsmith.worker.snapshots import Snapshots


class Checkpoints:
    """Those of a data directory: the rows are the engine's, the files the worker's."""

    def __init__(self, data_dir: Path, root: str = "") -> None:
        self.store = Store.open(data_dir)
        self.files = CheckpointFiles(data_dir, root)
        self.rows = CheckpointRows(self.store, self.files)

    def save(self, path: CheckpointPath, backend: LocalBackend, overwrite: bool = False, **more: Any) -> str:
        """Save the model of `path` as it is now; returns the path."""
        if not overwrite:
            self.rows.check_free(path)
        write = partial(write_state, backend.copy_state(path.model_id, optimizer=path.kind == "training"))
        return self.add(path, write, asdict(backend.optimizers[path.model_id].weights.shape), **more).tinker_path

    def add(
        self, path: CheckpointPath, write: Callable[[Path], None], lora_config: dict[str, Any], **more: Any
    ) -> Checkpoint:
        """A checkpoint whose directory `write` fills."""
        row = self.rows.announce(path, "tiny", "qwen3", lora_config, **more)
        steps = self.rows.written(SaveModel(1, "tiny", path.model_id, path.kind == "training", row), None)
        call = next(steps)
        assert isinstance(call, SaveModel)
        found = write_files(self.files, call.checkpoint, write)
        try:
            steps.send(found)
        except StopIteration as end:
            checkpoint: Checkpoint = end.value
            return checkpoint
        raise AssertionError("the database does not take the row")

    @contextmanager
    def opened(self, path: str, kind: CheckpointKind, optimizer: bool = False) -> Iterator[tuple[Checkpoint, Path]]:
        """A checkpoint and a directory of its files, to read while the body runs."""
        checkpoint = self.store.require_checkpoint(path, kind)
        with opened_files(self.files, checkpoint.directory, optimizer) as directory:
            yield checkpoint, directory


def find(snapshots: Snapshots, weights_id: str) -> Weights:
    """Weights to sample from, read first if they are not in memory."""
    held = snapshots.find("tiny", weights_id)
    if held is None:
        snapshots.hold(("tiny", weights_id), snapshots.reader("tiny", weights_id))
        held = snapshots.find("tiny", weights_id)
    assert held is not None
    return held
