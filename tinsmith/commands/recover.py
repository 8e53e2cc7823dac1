"""`tinsmith recover`: adds complete checkpoints that the database lacks, beside a server too.

It lacks some if it was replaced by an older copy, or a new one. Each `manifest.json` holds a row. Where an older copy
names files that no longer exist, because the checkpoint was replaced, the newer one takes its place.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tinsmith.errors import ConfigError, TinsmithError, reported
from tinsmith.store.files import CHECKPOINTS_DIR, CheckpointFiles
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.records import Checkpoint
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store, unknown_places


def recover(data_dir: Path, root: str) -> Iterator[str]:
    """Add missing checkpoints; yield for each unknown directory what was added, or why nothing was.

    `root` is looked into too, as with `--checkpoint-root`. Raises ConfigError: neither checkpoints nor a database, or
    it is damaged.
    """
    if not (data_dir / FILE_NAME).is_file() and not (data_dir / CHECKPOINTS_DIR).is_dir():
        raise ConfigError(f"data_dir={data_dir} holds no data of a server (neither {FILE_NAME} nor {CHECKPOINTS_DIR})")
    files = CheckpointFiles(data_dir, root)
    with contextlib.closing(Store.open(data_dir)) as store:
        added = 0
        for place, found in _newest_first(store, files):
            refusal = found if isinstance(found, str) else _refusal(store, files, found)
            if isinstance(found, Checkpoint) and refusal is None:
                store.put_checkpoint(found)
                added += 1
                yield f"added {found.tinker_path}"
            else:
                yield f"not added: {files.shown(place)}: {refusal}"
        yield f"{added} checkpoints added"


def _newest_first(store: Store, files: CheckpointFiles) -> list[tuple[str, Checkpoint | str]]:
    """Each directory with its checkpoint, or why it has none; newest first, because a path's newest is added."""
    found = [(place, _read(files, place)) for place in unknown_places(store, files)]
    return sorted(found, key=lambda pair: -pair[1].created_at if isinstance(pair[1], Checkpoint) else 0)


def _read(files: CheckpointFiles, place: str) -> Checkpoint | str:
    refusals: list[TinsmithError] = []
    with reported(TinsmithError, refusals.append), files.fetched(place) as directory:
        manifest = read_manifest(directory, files.shown(place))
        verify_files(manifest, directory, files.shown(place))
        return manifest.row(place)
    return str(refusals[0])


def _refusal(store: Store, files: CheckpointFiles, found: Checkpoint) -> str | None:
    """The reason not to add a complete checkpoint, if there is one."""
    if found.expires_at is not None and found.expires_at <= time.time():
        return f"{found.tinker_path} has expired"
    known = store.checkpoint(found.tinker_path)
    # One without files was replaced after the copy of the database was made
    if known is not None and files.at(known.directory).sizes():
        return (
            f"the database already has a checkpoint {found.tinker_path}, with files in {files.shown(known.directory)}"
        )
    return None
