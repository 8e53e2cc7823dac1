"""Copies of models on disk, from which new workers restore them when this one dies.

After a step for which the engine asks for a copy, weights and what AdamW remembers are copied, and a thread writes them
as the files of a checkpoint while training goes on. They are synced, to outlive this machine too.

A copy is a directory named by the seq_id of its step. It appears when it is complete; the one before it stays, to go
back to if this one is damaged. The same thread writes snapshots, in the order in which both were taken: so there is a
copy only when all snapshots before it are on the disk.

The limit is for all workers together. So beside the directory of a model's copies lies an empty file, whose name ends
with the number of bytes that were taken for them.
"""

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tinsmith.errors import TinsmithError
from tinsmith.protocol.place import Place
from tinsmith.store.disk import make_directory
from tinsmith.store.files import WRITING_PREFIX, kept_copies, put_in_place
from tinsmith.store.manifest import write_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import About, SavedState, write_state
from tinsmith.worker.background import Background

log = logging.getLogger(__name__)


@dataclass(eq=False)
class KeptCopies:
    """The copies that this worker writes. With those of all others they take at most `limit_bytes` on the disk."""

    data_dir: Path
    limit_bytes: float
    threads: Background
    place: Place
    reserved: dict[str, int] = field(default_factory=dict)
    """Disk bytes for this worker's copies of each model: three copies, as two stay while the next is written."""

    def keep(
        self, backend: LocalBackend, model_id: str, directory: Path, before: str, then: Callable[[bool, float], None]
    ) -> None:
        """Copy a model as it is now; `then` is told later whether `directory` holds the copy.

        It is told too for how many seconds the device has waited. The model's other copies but `before` are deleted.
        One that cannot be kept is logged.
        """
        started = time.monotonic()
        model = backend.optimizers[model_id]
        size = _room(model.weights.parameter_count)
        try:
            if not self._takes_room(model_id, size):
                self._not_kept(model_id, f"copies may take {self.limit_bytes / 2**30:.4g} GiB here (--kept-copies-gib)")
                then(False, 0.0)
                return
            base = backend.base
            about = About(
                base.name, base.tokenizer_id, base.family.model_type, model.weights.shape, base.known_fingerprint
            )
            state = backend.copied(model, about, optimizer=True)
        except (TinsmithError, OSError, MemoryError, RuntimeError) as error:
            self._not_kept(model_id, error)
            then(False, 0.0)
            return
        blocked_s = time.monotonic() - started
        log.debug("model %s is copied; the device waited for %.3f s", model_id, blocked_s)
        self.threads.run(
            partial(write_copy, state, model_id, directory, before),
            partial(self._written, model_id, blocked_s, then),
        )

    def _takes_room(self, model_id: str, size: int) -> bool:
        """Take room for the copies of a model, if there is any beside those of all others.

        It is taken before the others are counted: of two workers that take the last at the same time none gets it.
        """
        if self.reserved.get(model_id) == size:
            return True
        home = kept_copies(self.data_dir, model_id)
        make_directory(home.parent)
        taken = home.with_name(f"{home.name}.{size}")
        taken.touch()
        others = [file for file in home.parent.glob("*.*") if file.stem != home.name]
        fits = size + sum(int(file.suffix[1:]) for file in others) <= self.limit_bytes
        for file in _taken(home):
            if (file != taken) == fits:  # what was taken before, or what was not to be had
                file.unlink(missing_ok=True)
        if fits:
            self.reserved[model_id] = size
        return fits

    def restored(self, model_id: str, directory: str, parameters: int) -> None:
        """Take the room of a kept copy from which a model was loaded, if the next one is written here."""
        if self.place.writes(model_id) and Path(directory).parent == kept_copies(self.data_dir, model_id):
            self.reserved[model_id] = _room(parameters)

    def forget(self, model_id: str) -> None:
        """Delete the copies of a model, whichever worker wrote them."""
        self.reserved.pop(model_id, None)
        directory = kept_copies(self.data_dir, model_id)
        if _taken(directory) or directory.exists():
            self.threads.run(partial(_delete, directory), lambda ended: None)

    def _written(
        self, model_id: str, blocked_s: float, then: Callable[[bool, float], None], ended: "Future[None]"
    ) -> None:
        error = ended.exception()
        if error is not None:
            self._not_kept(model_id, error)
        then(error is None, blocked_s)

    def _not_kept(self, model_id: str, why: object) -> None:
        log.warning("no copy of model %s could be kept, so its replay would take longer: %s", model_id, why)


def _room(parameters: int) -> int:
    """Bytes of three copies of a model: weights and two moments each, in float32."""
    return 3 * 3 * 4 * parameters


def _taken(home: Path) -> list[Path]:
    """The files that say how much room the copies in that directory take: one, once it is settled."""
    return list(home.parent.glob(f"{home.name}.*"))


def _delete(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    for file in _taken(home):
        file.unlink(missing_ok=True)


def write_copy(state: SavedState, model_id: str, directory: Path, before: str) -> None:
    """Write a copy to `directory`, which appears when it is complete, and delete the model's others but `before`."""
    home = directory.parent
    make_directory(home)
    writing = home / f"{WRITING_PREFIX}{directory.name}"
    for left in (writing, directory):  # by a worker that has died
        shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, writing, ignore_errors=True)  # or a full disk would stay full
        _write_files(state, model_id, directory, writing)
        put_in_place(writing, directory)
        undo.pop_all()
    for other in home.iterdir():
        if str(other) not in (before, str(directory)):
            shutil.rmtree(other, ignore_errors=True)


def _write_files(state: SavedState, model_id: str, directory: Path, writing: Path) -> None:
    """Write the files of a copy that will be `directory` to `writing`."""
    write_state(state, writing)
    sizes = [file.stat().st_size for file in writing.iterdir()]
    about = state.about
    row = Checkpoint(
        tinker_path=name_of_copy(model_id),
        model_id=model_id,
        kind="training",
        name=directory.name,
        directory=str(directory),
        base_model=about.base_model,
        architecture=about.architecture,
        lora_config=asdict(about.shape),
        has_optimizer=True,
        size_bytes=sum(sizes),
        user_metadata=None,
        created_at=time.time(),
        expires_at=None,
    )
    write_manifest(writing, row, most_threads=1)  # nobody waits for it, and training needs the cores


def name_of_copy(model_id: str) -> str:
    """Return the name of a model's kept copy in messages."""
    return f"the kept copy of model {model_id}"
