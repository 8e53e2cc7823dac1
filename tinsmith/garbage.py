"""`tinsmith gc`: what a data directory holds that nobody can reach any more, printed and deleted.

It works beside a running server. What only an engine that has ended can have left, the snapshots that it put on the disk, goes if no
server runs on the directory. Complete checkpoints that the database does not know are kept unless `unknown` asks for their end:
`tinsmith recover` registers them.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.store.database import FILE_NAME
from tinsmith.store.files import SNAPSHOTS_DIR, CheckpointFiles
from tinsmith.store.lock import only_user
from tinsmith.store.store import Store
from tinsmith.store.sweep import Garbage, find_garbage, find_unknown, sweep


def collect_garbage(data_dir: Path, dry_run: bool, unknown: bool) -> Iterator[str]:
    """One line for each thing, then a total; deletes them unless `dry_run`. Raises TinsmithError.

    Without `unknown`, complete files that the database does not know are counted in the last line, and kept.
    """
    if not (data_dir / FILE_NAME).is_file():
        raise ConfigError(f"data_dir={data_dir} holds no data of a server (there is no {FILE_NAME} in it)")
    with contextlib.closing(Store.open(data_dir)) as store, only_user(data_dir) as alone:
        files = CheckpointFiles(data_dir)
        snapshots = _snapshots(data_dir) if alone else []
        strays = find_unknown(store, files)
        garbage = [*find_garbage(store, files), *(strays if unknown else []), *snapshots]
        yield from _report(garbage, dry_run)
        if not dry_run:
            sweep(store, files, unknown)
            if snapshots:
                shutil.rmtree(data_dir / SNAPSHOTS_DIR)
        if strays and not unknown:
            total = sum(stray.size_bytes for stray in strays)
            yield (
                f"{total:>15,}  bytes are kept in {len(strays)} complete checkpoints that the database does not know: "
                f"`tinsmith recover --data-dir {data_dir}` registers them, `tinsmith gc --unknown` deletes them"
            )


def _snapshots(data_dir: Path) -> list[Garbage]:
    """What an engine that is gone put on the disk."""
    directory = data_dir / SNAPSHOTS_DIR
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return [Garbage("snapshots", "the engine that had them is gone", size)] if size else []


def _report(garbage: list[Garbage], dry_run: bool) -> Iterator[str]:
    if not garbage:
        yield "there is nothing to delete"
        return
    for thing in garbage:
        yield f"{thing.size_bytes:>15,}  {thing.what}: {thing.reason}"
    total = sum(thing.size_bytes for thing in garbage)
    yield f"{total:>15,}  bytes {'would be' if dry_run else 'are'} freed"
