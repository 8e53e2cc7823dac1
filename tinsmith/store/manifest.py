"""`manifest.json` of a checkpoint, written after all its other files.

It holds the row, with which `tinsmith recover` adds it to a database, and digests, by which damage is found.
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tinsmith.errors import TinsmithError, translated
from tinsmith.store.digests import BLOCK_BYTES, MAX_THREADS, blocks_of, digests_of
from tinsmith.store.disk import sync_all
from tinsmith.store.records import Checkpoint

NAME = "manifest.json"
FORMAT_VERSION = 1
REMEDY = "put back a copy of it (a backup made by `tinsmith backup`), or use another checkpoint"
"""The end of a message about damaged files."""


@dataclass(frozen=True)
class FileDigests:
    """One file of a checkpoint."""

    size: int
    sha256: list[str]
    """Of each block of BLOCK_BYTES, in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    checkpoint: dict[str, Any]
    """The row as it was saved, without the directory."""
    files: dict[str, FileDigests]
    """By name relative to the directory."""

    def row(self, directory: str) -> Checkpoint:
        """The checkpoint's row, with its files in `directory`."""
        return Checkpoint(**self.checkpoint, directory=directory)


def write_manifest(directory: Path, checkpoint: Checkpoint, most_threads: int = MAX_THREADS) -> None:
    """Write the manifest of a complete directory, and sync the other files. Raises OSError."""
    row = {name: value for name, value in asdict(checkpoint).items() if name != "directory"}
    found = sorted(file for file in directory.rglob("*") if file.is_file())
    sizes = {file: file.stat().st_size for file in found}
    with ThreadPoolExecutor(1) as beside:  # digests keep a processor busy, and syncing the disk
        flushing = beside.submit(sync_all, found)
        digests = iter(digests_of([block for file in found for block in blocks_of(file, 0, sizes[file])], most_threads))
        flushing.result()
    files = {
        file.relative_to(directory).as_posix(): FileDigests(
            sizes[file], [next(digests) for _ in blocks_of(file, 0, sizes[file])]
        )
        for file in found
    }
    content = {"format_version": FORMAT_VERSION, "block_bytes": BLOCK_BYTES, "checkpoint": row}
    content |= {"files": {name: asdict(file) for name, file in files.items()}}
    (directory / NAME).write_text(json.dumps(content | {"sha256": _own_digest(content)}, indent=1))


def parse_manifest(text: str | bytes, shown: str) -> Manifest:
    """The manifest in `text`; `shown` names its directory. Raises TinsmithError if damaged or of another format."""
    whole = False
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(text)
        whole = content.pop("sha256") == _own_digest(content)
    if not whole:
        raise TinsmithError(f"{shown}/{NAME} is damaged: its checksum is not that of its content; {REMEDY}")
    if (content["format_version"], content["block_bytes"]) != (FORMAT_VERSION, BLOCK_BYTES):
        version = content["format_version"]
        raise TinsmithError(
            f"{shown}/{NAME} has format version {version}; this Tinsmith reads {FORMAT_VERSION}, "
            "use the one that wrote it"
        )
    known = {spec.name for spec in fields(Checkpoint)} - {"directory"}
    row = {name: value for name, value in content["checkpoint"].items() if name in known}
    missing = [spec.name for spec in fields(Checkpoint) if spec.default is MISSING and spec.name in known - row.keys()]
    if missing:
        raise TinsmithError(
            f"{shown}/{NAME} does not say the checkpoint's {', '.join(missing)}; use the Tinsmith that wrote it"
        )
    return Manifest(row, {name: FileDigests(**file) for name, file in content["files"].items()})


def read_manifest(directory: Path, shown: str) -> Manifest:
    """The manifest of a directory. Raises TinsmithError: none, or as `parse_manifest`."""
    with translated(FileNotFoundError, TinsmithError, lambda _: f"{shown}/{NAME} is missing; {REMEDY}"):
        text = (directory / NAME).read_bytes()
    return parse_manifest(text, shown)


def verify_files(manifest: Manifest, directory: Path, shown: str, names: Iterable[str] | None = None) -> None:
    """Raise TinsmithError unless these files (default: all) are what was written."""
    chosen = [name for name in manifest.files if names is None or name in names]
    for name in chosen:
        expected, path = manifest.files[name], directory / name
        if not path.is_file():
            raise TinsmithError(f"{shown}/{name} is missing; {REMEDY}")
        size = path.stat().st_size
        if size != expected.size:
            raise TinsmithError(
                f"{shown}/{name} is damaged: it has {size:,} bytes, and {expected.size:,} were written; {REMEDY}"
            )
    blocks = [(name, block) for name in chosen for block in blocks_of(directory / name, 0, manifest.files[name].size)]
    expected_digests = [digest for name in chosen for digest in manifest.files[name].sha256]
    for (name, block), digest, expected_digest in zip(
        blocks, digests_of([block for _, block in blocks]), expected_digests, strict=True
    ):
        if digest != expected_digest:
            where = f"bytes {block.start:,} to {block.start + block.size:,}"
            raise TinsmithError(f"{shown}/{name} is damaged: the SHA-256 of {where} is not what was written; {REMEDY}")


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
