"""`tinsmith backup`: copies a data directory, also while a server uses it; and `restore`, which copies it back.

The database comes first, in the state of one moment, then images whose operations have not ended. Checkpoints never
change and come last; for one that a client replaces meanwhile, the new one is copied. Those elsewhere
(`--checkpoint-root`) are copied into the copy's data directory. Kept copies are left out: models that were loaded are
lost there, wherever it is served.
"""

import shlex
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tinsmith.config_values import require_empty
from tinsmith.errors import ConfigError, NotFoundError, TinsmithError, translated
from tinsmith.store import catalog, disk, histories, recorded_sequences
from tinsmith.store.database import database_url, require_data, without_password
from tinsmith.store.disk import make_directory
from tinsmith.store.files import CheckpointFiles, whole_directory
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.records import Checkpoint
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store, opened

_BEGUN = ".new"
"""Suffix of unfinished files."""


@dataclass(frozen=True)
class _Side:
    """Database and files of the original or the copy."""

    store: Store
    files: CheckpointFiles


def back_up(data_dir: Path, target: Path) -> Iterator[str]:
    """Copy a data directory to `target`, empty or new; yield a line for each checkpoint.

    Raises ConfigError for unusable directories. Raises TinsmithError if the copy cannot be written, and then leaves
    nothing, or, at the end, if checkpoints are damaged or have no files.
    """
    require_data(data_dir)
    if (url := database_url(data_dir)) is not None:
        plain = shlex.quote(without_password(url).set(drivername="postgresql").render_as_string())
        raise ConfigError(
            f"data_dir={data_dir} has its database in PostgreSQL, which `tinsmith backup` does not copy: run "
            f"`pg_dump --format=custom --file=FILE {plain}`, and then copy {data_dir}; this order works beside a server"
        )
    require_empty(target)
    if target.resolve().is_relative_to(data_dir.resolve()):
        raise ConfigError(f"{target} is inside the data directory; name a directory outside of {data_dir}")
    problems: list[str] = []

    def why_not(error: Exception) -> str:
        return f"{data_dir} could not be copied to {target}: {error}; correct that and start again"

    with translated((OSError, sqlite3.Error), TinsmithError, why_not):
        make_directory(target.absolute().parent)
        with whole_directory(target.absolute()) as copy:
            _copy_database(data_dir / FILE_NAME, copy / FILE_NAME)
            _copy_files(data_dir, copy)
            with opened(data_dir) as source, opened(copy) as store:
                histories.forget_engines(store)
                store.copy_blobs_from(source)
                yield from _copy_checkpoints(
                    _Side(source, CheckpointFiles(data_dir)), _Side(store, CheckpointFiles(copy)), problems
                )
    yield f"{target} is a copy of {data_dir}: tinsmith serve --data-dir {shlex.quote(str(target))}"
    if problems:
        raise TinsmithError(
            f"{len(problems)} checkpoints in {data_dir} are damaged or have no files: {'; '.join(problems)}"
        )


def _copy_database(source: Path, target: Path) -> None:
    """Copy the state of one moment, log included, while others may write."""
    with closing(sqlite3.connect(source)) as reader, closing(sqlite3.connect(target)) as writer:
        reader.backup(writer)


def _copy_files(data_dir: Path, target: Path) -> None:
    """Copy the other files, such as the signing key and the journal of samples.

    Recorded sequences are left out: they last a day, and change while they are copied.
    """
    for file in data_dir.iterdir():
        left_out = (
            file.name.startswith((FILE_NAME, recorded_sequences.FILE_NAME))
            or file.name == disk.LOCK_NAME
            or file.suffix == _BEGUN
        )
        if file.is_file() and not left_out:
            shutil.copy2(file, target)


def _copy_checkpoints(original: _Side, copy: _Side, problems: list[str]) -> Iterator[str]:
    """Copy every checkpoint of the copied database, or the one that replaced it; append damaged ones to `problems`."""
    waiting = _by_directory(catalog.every_checkpoint(copy.store))
    while waiting:
        directory = next(iter(waiting))
        rows = waiting.pop(directory)
        paths = ", ".join(row.tinker_path for row in rows)
        problem = _copy_directory(original, copy, directory)
        now = [row for row in (original.store.checkpoint(row.tinker_path) for row in rows) if row is not None]
        if problem is None or [row.directory for row in now] == [directory] * len(rows):
            problems += [] if problem is None else [f"{paths}: {problem}"]
            yield from _keep_rows(copy, directory, paths)
        else:
            copy.files.remove(_name(directory))
            catalog.drop_checkpoints_in(copy.store, directory)
            for row in now:
                copy.store.put_checkpoint(row)
            waiting |= _by_directory(now)
            yield f"{paths}: {'replaced meanwhile; the new one is copied' if now else 'deleted meanwhile; not copied'}"
    catalog.forget_discarded(copy.store)  # the files to be deleted exist only in the original


def _keep_rows(copy: _Side, directory: str, paths: str) -> Iterator[str]:
    """Keep the rows of a copied directory, damaged or not; drop them if there was none."""
    if _copied(copy, directory).is_dir():
        catalog.move_checkpoints_in(copy.store, directory, _name(directory))
        yield paths
    else:
        catalog.drop_checkpoints_in(copy.store, directory)


def _by_directory(checkpoints: Iterable[Checkpoint]) -> dict[str, list[Checkpoint]]:
    found: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        found.setdefault(checkpoint.directory, []).append(checkpoint)
    return found


def _name(directory: str) -> str:
    return directory.rpartition("/")[2]


def _copied(copy: _Side, directory: str) -> Path:
    return Path(copy.files.shown(_name(directory)))


def _copy_directory(original: _Side, copy: _Side, directory: str) -> str | None:
    """Copy a checkpoint's files; returns what is wrong with them."""
    shown = original.files.shown(directory)
    try:
        with original.files.fetched(directory) as found, copy.files.written(_name(directory)) as files:
            _copy_tree(found, files)
        manifest = read_manifest(_copied(copy, directory), shown)
        verify_files(manifest, _copied(copy, directory), shown)
    except NotFoundError:
        return f"{shown} does not exist"
    except TinsmithError as error:
        return str(error)
    return None


def _copy_tree(source: Path, target: Path) -> None:
    """Copy all files of a directory. Raises FileNotFoundError if there are none, or one is deleted meanwhile."""
    files = [file for file in source.rglob("*") if file.is_file()]
    if not files:
        raise FileNotFoundError(source)
    for file in files:
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copied)
