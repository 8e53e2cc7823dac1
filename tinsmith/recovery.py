"""`tinsmith recover`: register checkpoints whose files are complete and which the database does not know.

The database may be an older copy, or a new one after the former was damaged. Each checkpoint's `manifest.json` holds its row. Where an
older copy names files that are gone, because the checkpoint was replaced later, the later one takes its place. It works beside a running
server, which finds the checkpoints at once.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.store.database import FILE_NAME
from tinsmith.store.files import CHECKPOINTS_DIR, CheckpointFiles
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.store.sweep import unknown_places


def recover(data_dir: Path, root: str) -> Iterator[str]:
    """Register checkpoints; yields one line for each directory that the database does not know: what was registered, or why it was not.

    `root` is a further place to look in, as `--checkpoint-root` names it. Raises ConfigError: neither checkpoints nor a database, or a
    database that is damaged.
    """
    if not (data_dir / FILE_NAME).is_file() and not (data_dir / CHECKPOINTS_DIR).is_dir():
        raise ConfigError(f"data_dir={data_dir} holds no data of a server (neither {FILE_NAME} nor {CHECKPOINTS_DIR})")
    files = CheckpointFiles(data_dir, root)
    with contextlib.closing(Store.open(data_dir)) as store:
        registered = 0
        for place, found in _newest_first(store, files):
            refusal = found if isinstance(found, str) else _refusal(store, files, found)
            if isinstance(found, Checkpoint) and refusal is None:
                store.put_checkpoint(found)
                registered += 1
                yield f"registered {found.tinker_path}"
            else:
                yield f"not registered: {files.shown(place)}: {refusal}"
        yield f"{registered} checkpoints registered"


def _newest_first(store: Store, files: CheckpointFiles) -> list[tuple[str, Checkpoint | str]]:
    """Each place with its checkpoint, or with why it has none: of several with one path the newest one counts."""
    found = [(place, _read(files, place)) for place in unknown_places(store, files)]
    return sorted(found, key=lambda pair: -pair[1].created_at if isinstance(pair[1], Checkpoint) else 0)


def _read(files: CheckpointFiles, place: str) -> Checkpoint | str:
    try:
        with files.fetched(place) as directory:
            manifest = read_manifest(directory, files.shown(place))
            if manifest is None:
                return "it has no manifest.json, which older versions did not write, so its path is unknown"
            verify_files(manifest, directory, files.shown(place))
            return manifest.row(place)
    except TinsmithError as error:
        return str(error)


def _refusal(store: Store, files: CheckpointFiles, found: Checkpoint) -> str | None:
    """Why a whole checkpoint is not registered; None if it can be."""
    if found.expires_at is not None and found.expires_at <= time.time():
        return f"{found.tinker_path} has expired"
    known = store.checkpoint(found.tinker_path)
    if known is not None and files.sizes(known.directory):  # without files it was replaced after the copy of the database was made
        return f"the database has a checkpoint of the path {found.tinker_path} already, with files in {files.shown(known.directory)}"
    return None
