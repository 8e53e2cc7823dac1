"""`tinsmith gc`: deletes expired checkpoints and unused files, beside a server too.

If none runs, also snapshots and kept copies of models that do not come back. Complete checkpoints without a row are
kept, because `tinsmith recover` adds them; `unknown` deletes them.
"""

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tinsmith.store.disk import only_user
from tinsmith.store.files import CheckpointFiles, copies_left, delete_copies_left
from tinsmith.store.store import Garbage, Store, find_garbage, find_unknown, opened, sweep


def collect_garbage(data_dir: Path, dry_run: bool, unknown: bool) -> Iterator[str]:
    """Delete unused files, unless `dry_run`; yield a line for each, then a total. Raises TinsmithError."""
    with opened(data_dir) as store, only_user(data_dir) as alone:
        files = CheckpointFiles(data_dir)
        coming_back = {stored.model_id for stored in store.histories()}
        left = _left_by_engine(data_dir, coming_back) if alone else []
        strays = find_unknown(store, files)
        garbage = [*find_garbage(store, files), *(strays if unknown else []), *_images(store), *left]
        yield from _report(garbage, dry_run)
        if not dry_run:
            sweep(store, files, unknown)
            store.sweep_blobs()
            if left:
                delete_copies_left(data_dir, coming_back)
        if strays and not unknown:
            total = sum(stray.size_bytes for stray in strays)
            yield (
                f"{total:>15,}  bytes are kept in {len(strays)} complete checkpoints that are not in the database: "
                f"`tinsmith recover --data-dir {shlex.quote(str(data_dir))}` adds them, `tinsmith gc --unknown` "
                "deletes them"
            )


def _images(store: Store) -> list[Garbage]:
    """Images whose process died before it wrote the operation."""
    unused = store.unused_blobs()
    size = sum(file.size for file in unused)
    return [Garbage(f"{len(unused)} images of operations", "no operation needs them", size)] if unused else []


def _left_by_engine(data_dir: Path, coming_back: set[str]) -> list[Garbage]:
    """Snapshots and kept copies of other models than these. Only if no server uses the directory."""
    sizes: Counter[str] = Counter()
    for what, place in copies_left(data_dir, coming_back):
        sizes[what] += sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return [Garbage(what, "their models do not come back", size) for what, size in sizes.items() if size]


def _report(garbage: list[Garbage], dry_run: bool) -> Iterator[str]:
    if not garbage:
        yield "there is nothing to delete"
        return
    for thing in garbage:
        yield f"{thing.size_bytes:>15,}  {thing.what}: {thing.reason}"
    total = sum(thing.size_bytes for thing in garbage)
    yield f"{total:>15,}  bytes {'would be' if dry_run else 'are'} freed"
