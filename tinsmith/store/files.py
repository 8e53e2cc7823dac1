"""Files of checkpoints: directories that are written once, completely or not at all.

A checkpoint's row names its place: a name below the data directory's `checkpoints`, or a path or URL below a configured
root. So the data directory can be moved, and the root changed.
"""

import hashlib
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tinsmith.errors import ConfigError, NotFoundError, TinsmithError, translated
from tinsmith.store.disk import make_directory, sync, sync_all
from tinsmith.store.manifest import NAME as MANIFEST

CHECKPOINTS_DIR = "checkpoints"
"""Below a data directory, as the next two."""
SNAPSHOTS_DIR = "snapshots"
"""Snapshots for which memory has no room."""
SNAPSHOT_FILE = "snapshot.json"
"""Says of which snapshot the files of a directory are."""
KEPT_DIR = "kept_copies"
"""Copies that restore models after a crash."""
ABOUT_FILE, OPTIMIZER_FILE = "checkpoint.json", "optimizer.safetensors"
"""The file of a checkpoint that names its base model, and the one of its optimizer."""
WRITING_PREFIX = ".writing-"
"""Begins the name of an unfinished directory; the final name follows."""
_JOINT = "joint"
"""Ends the name of one that several processes fill."""
WRITING_S = 86400.0
"""Older unfinished directories were left by a process that died."""
_NAME = re.compile(r"[0-9a-f]{32}")
"""Names that `new_place` makes."""
_BLOCK_BYTES = 2**20


def kept_copies(data_dir: Path, model_id: str) -> Path:
    """The place of a model's kept copies. A digest: clients choose parts of a model id."""
    return data_dir.resolve() / KEPT_DIR / hashlib.sha256(model_id.encode()).hexdigest()[:32]


def copies_left(data_dir: Path, models: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield what is left of kept copies and snapshots of all but these models: what it is, and where."""
    known = {kept_copies(data_dir, model_id).name for model_id in models}
    for place in (data_dir / KEPT_DIR).glob("*"):
        if place.stem not in known:
            yield "kept copies of models", place
    for place in {file.parent for file in (data_dir / SNAPSHOTS_DIR).rglob("*") if file.is_file()}:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # of a damaged one nobody knows more
            if json.loads((place / SNAPSHOT_FILE).read_text())["snapshot_id"].rpartition("/")[0] in models:
                continue
        yield "snapshots", place


def delete_copies_left(data_dir: Path, models: Collection[str]) -> None:
    """Delete kept copies and snapshots of all but these models."""
    for _, place in list(copies_left(data_dir, models)):
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        with suppress(OSError):  # others are in it
            place.parent.rmdir()


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory to fill, synced and renamed to `directory` at the end, or deleted if the body fails."""
    with tempfile.TemporaryDirectory(
        prefix=f"{WRITING_PREFIX}{directory.name}-", dir=directory.parent, ignore_cleanup_errors=True
    ) as temporary:
        yield Path(temporary)
        put_in_place(Path(temporary), directory)


def put_in_place(files: Path, directory: Path) -> None:
    """Rename a directory of files to `directory`, which survives a power cut, and is whole if it is there."""
    sync_all([*files.rglob("*"), files])
    files.rename(directory)
    sync(directory.parent)


@contextmanager
def deleted_at_last(directory: Path) -> Iterator[Path]:
    """Delete a directory when the body ends, unless it was renamed."""
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Entry:
    """A directory of checkpoint files in the data directory."""

    name: str
    place: str
    """Its place once it is finished; empty for a temporary copy."""
    finished: bool
    modified_at: float
    """Unix time."""


def _errors_of(system: AbstractFileSystem) -> tuple[type[Exception], ...]:
    """Errors with which a file system refuses, or does not answer."""
    if "s3" in system.protocol:
        from botocore.exceptions import BotoCoreError  # s3fs installs it

        return OSError, BotoCoreError
    return (OSError,)


@dataclass(frozen=True)
class Directory:
    """A directory of checkpoint files, on a disk or in an object store, whose errors become TinsmithError."""

    system: AbstractFileSystem
    path: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.system, LocalFileSystem)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Raise errors of the file system as TinsmithError, but for FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except _errors_of(self.system) as error:
            raise TinsmithError(f"the place {self.path} of checkpoint files cannot be used: {error}") from error

    def require_usable(self, only_read: bool) -> None:
        """List the directory, or write a small file there. Raises TinsmithError."""
        if only_read:
            if self.is_local and not self.system.isdir(self.path):
                raise TinsmithError(
                    "there is no such directory; start the server that writes to it first, or mount it here"
                )
            self.names()
            return
        with self._used():
            if self.is_local:
                make_directory(Path(self.path))
            probe = f"{self.path}/{WRITING_PREFIX}{uuid.uuid4().hex}"
            self.system.pipe_file(probe, b"")
            self.system.rm_file(probe)

    def names(self) -> list[str]:
        """Names of finished directories in it; in an object store also of those being written."""
        names: list[str] = []
        with suppress(FileNotFoundError), self._used():  # an object store has no directory before something is in it
            names = [str(found).rstrip("/").rpartition("/")[2] for found in self.system.ls(self.path, detail=False)]
        return [name for name in sorted(names) if _NAME.fullmatch(name)]

    def _all_sizes(self) -> dict[str, int]:
        with self._used():
            found = self.system.find(self.path, detail=True)
        return {name.removeprefix(f"{self.path}/"): info["size"] for name, info in sorted(found.items())}

    def sizes(self) -> dict[str, int]:
        """Size in bytes of each file by name, without the manifest; empty if nothing is there."""
        return {name: size for name, size in self._all_sizes().items() if name != MANIFEST}

    def total(self) -> int:
        return sum(self._all_sizes().values())

    def manifest(self) -> bytes | None:
        with suppress(FileNotFoundError), self._used():
            content: bytes = self.system.cat_file(f"{self.path}/{MANIFEST}")
            return content
        return None

    def read(self, name: str, wanted: range) -> Iterator[bytes]:
        """Bytes of a file that `sizes` names, in blocks."""
        with self._used(), self.system.open(f"{self.path}/{name}", "rb") as file:
            file.seek(wanted.start)
            left = len(wanted)
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                left -= len(block)
                yield block

    def copy_to(self, target: Path) -> None:
        for name in self._all_sizes():
            with self._used():
                self.system.get_file(f"{self.path}/{name}", str(target / name))

    def upload(self, source: Path) -> None:
        """Write the files of a local directory, the manifest last: other servers look for that."""
        with self._used():
            files = [file for file in source.rglob("*") if file.is_file()]
            for file in sorted(files, key=lambda file: (file.name == MANIFEST, file)):
                self.system.put_file(str(file), f"{self.path}/{file.relative_to(source).as_posix()}")

    def remove(self) -> None:
        with suppress(FileNotFoundError), self._used():
            self.system.rm(self.path, recursive=True)


class CheckpointFiles:
    """The directories of checkpoint files, by place."""

    def __init__(self, data_dir: Path, root: str = "", only_read: bool = False) -> None:
        """New directories are made below `root`, a directory or URL, or else in the data directory.

        With `only_read` another server writes there. Raises ConfigError for an unusable root.
        """
        self._home = (data_dir / CHECKPOINTS_DIR).resolve()
        # A place outlives the working directory of the process that writes it.
        self._root = root.rstrip("/") if "://" in root or not root else str(Path(root).expanduser().resolve())
        make_directory(self._home)
        if not root:
            return
        if "://" in root and not root.partition("://")[2].strip("/"):
            raise ConfigError(
                f"checkpoint_root={root!r} names no bucket; give it as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )
        trouble = (ImportError, FileNotFoundError, ValueError, TinsmithError)  # an unknown kind of store, or no access
        remedy = (
            "look at its name and at the credentials of its store (AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, or "
            "GOOGLE_APPLICATION_CREDENTIALS)"
            if "://" in root
            else "name a directory that this user can write"
        )

        def why_not(error: Exception) -> str:
            told = f"checkpoint_root={root!r} cannot be used: {error}"
            return told if "; " in str(error) else f"{told}; {remedy}"  # ours say themselves what to do

        with translated(trouble, ConfigError, why_not):
            self.at(self._root).require_usable(only_read)

    def at(self, place: str) -> Directory:
        """The directory of a place, there or not."""
        shown = self.shown(place)
        if "://" not in shown:  # fsspec would cut a path at `::`, and remove what is in front of it
            return Directory(LocalFileSystem(), shown)
        if "::" in shown:
            raise TinsmithError(f"{shown}: fsspec takes '::' in a URL for a chain of stores; choose a URL without it")
        # Listings are not cached, because other processes write as well.
        return Directory(*url_to_fs(shown, use_listings_cache=False))

    def shown(self, place: str) -> str:
        """The path or URL of a place, for messages."""
        return place if "/" in place else str(self._home / place)

    def new_place(self) -> str:
        name = uuid.uuid4().hex
        return f"{self._root}/{name}" if self._root else name

    @contextmanager
    def written(self, place: str) -> Iterator[Path]:
        """A local directory to fill.

        At the end its files are at `place` and synced, or nothing is if the body fails.
        """
        target = self.at(place)
        if target.is_local:
            with whole_directory(Path(target.path)) as directory:
                yield directory
            return
        with tempfile.TemporaryDirectory(prefix=WRITING_PREFIX, dir=self._home) as scratch:
            yield Path(scratch)
            target.upload(Path(scratch))

    def _begun(self, target: Directory) -> tuple[Path, str]:
        """Parent, and beginning of the name, of unfinished directories: for an object store in the data directory."""
        path = Path(target.path)
        return path.parent if target.is_local else self._home, f"{WRITING_PREFIX}{path.name}-"

    def joint(self, place: str) -> Path:
        """The directory in which several processes put what is to be at `place`. The first of them makes it."""
        home, prefix = self._begun(self.at(place))
        return home / f"{prefix}{_JOINT}"

    @contextmanager
    def joined(self, place: str) -> Iterator[Path]:
        """Complete what is in `joint`, otherwise as `written`."""
        target = self.at(place)
        with deleted_at_last(self.joint(place)) as directory:
            yield directory
            if target.is_local:
                put_in_place(directory, Path(target.path))
            else:
                target.upload(directory)

    @contextmanager
    def fetched(self, place: str) -> Iterator[Path]:
        """A local directory with the files. Raises NotFoundError if they have been deleted."""
        source = self.at(place)
        gone = "the files of this checkpoint are gone: it was deleted while it was read"
        with translated(FileNotFoundError, NotFoundError, lambda _: gone):
            if source.is_local:
                yield Path(source.path)
                return
            with tempfile.TemporaryDirectory(prefix=WRITING_PREFIX, dir=self._home) as scratch:
                source.copy_to(Path(scratch))
                yield Path(scratch)

    def remove(self, place: str) -> None:
        """Delete a directory, if it is there, and unfinished ones that were to become it."""
        for directory in self._all_of(place):
            directory.remove()

    def remaining_bytes(self, place: str) -> int:
        return sum(directory.total() for directory in self._all_of(place))

    def _all_of(self, place: str) -> list[Directory]:
        """The directory of a place, behind unfinished ones that were to become it."""
        target = self.at(place)
        home, prefix = self._begun(target)
        return [*(Directory(LocalFileSystem(), str(begun)) for begun in home.glob(f"{prefix}*")), target]

    def entries(self) -> list[Entry]:
        """All directories in the data directory, with or without a row."""
        return [entry for path in sorted(self._home.iterdir()) if (entry := _entry(path)) is not None]

    def finished_places(self) -> list[str]:
        """Places of finished directories, in the data directory and below the root."""
        places = [entry.place for entry in self.entries() if entry.finished]
        return places + [place for place in self.places_below_root() if place.rpartition("/")[2] not in places]

    def places_below_root(self) -> list[str]:
        """Places of finished directories below the root, as `Directory.names`."""
        return [f"{self._root}/{name}" for name in self.at(self._root).names()] if self._root else []


def _entry(path: Path) -> Entry | None:
    """The entry for a path; None for a name that is not ours, or if it was just deleted."""
    finished = _NAME.fullmatch(path.name) is not None
    if not finished and not path.name.startswith(WRITING_PREFIX):
        return None
    place = path.name if finished else path.name.removeprefix(WRITING_PREFIX).rpartition("-")[0]
    with suppress(FileNotFoundError):
        return Entry(path.name, place, finished, path.stat().st_mtime)
    return None
