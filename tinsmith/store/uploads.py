"""Files of adapters that clients upload, until a checkpoint is made of them.

    uploads/ID/upload.json    who uploads what, and until when
    uploads/ID/FILE           a file once it is complete, `.FILE` before
    uploads/room.lock         held while room for an upload or a file is looked for
    uploads/import.lock       held while a checkpoint is made of an upload

All processes that answer HTTP share the directory, and none keeps more of an upload.
"""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tinsmith.errors import BackpressureError, NotFoundError, TinsmithError, UserError, translated
from tinsmith.store.disk import make_directory, open_lock, renamed

UPLOADS_DIR = "uploads"
"""Below a data directory."""
UPLOAD_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter as PEFT names them."""
_ABOUT = Path("upload.json")
_ID, _DIRECTORIES = re.compile(r"[0-9a-f]{32}"), "?" * 32
_MOST, _MOST_OF_ONE = 64, 8
"""Unfinished uploads of all tenants, and of one."""
_KEPT_S = 3600
"""Seconds for which an upload is kept that has expired: a request that began before may still use its files."""
_LEFT_BYTES = 2**30
"""Bytes of the disk that uploads leave free, beside room for the checkpoint that is made of them."""


@dataclass(frozen=True)
class Upload:
    """An upload that has begun."""

    upload_id: str
    tenant: str
    base_model: str
    lora_config: dict[str, Any]
    project_id: str | None
    expires: int
    """Unix time."""
    allowed_bytes: int | None = None
    """What the unfinished uploads of its tenant may have together, as its key allowed when it began; None: any."""


class Uploads:
    """The unfinished uploads of a data directory. For any thread and process."""

    def __init__(self, data_dir: Path) -> None:
        self._home = data_dir / UPLOADS_DIR

    def begin(
        self,
        tenant: str,
        base_model: str,
        lora_config: dict[str, Any],
        project_id: str | None,
        expires: int,
        allowed_bytes: int | None = None,
    ) -> Upload:
        """Begin an upload. Raises BackpressureError if there are too many."""
        self.sweep()
        with self._alone():
            others = [upload for upload in self._all() if upload.expires > time.time()]
            own = sum(upload.tenant == tenant for upload in others)
            if own >= _MOST_OF_ONE or len(others) >= _MOST:
                raise BackpressureError(
                    f"{own} uploads of this tenant and {len(others)} in all are not finished, of at most "
                    f"{_MOST_OF_ONE} and {_MOST}; finish some, or wait until they expire"
                )
            upload = Upload(uuid.uuid4().hex, tenant, base_model, lora_config, project_id, expires, allowed_bytes)
            make_directory(self._home / upload.upload_id)
            about = self._home / upload.upload_id / _ABOUT
            with renamed(about.with_suffix(".new"), about):
                about.with_suffix(".new").write_text(json.dumps(asdict(upload)))
        return upload

    def require(self, upload_id: str, tenant: str | None = None) -> Upload:
        """The upload. Raises NotFoundError if there is none, it has expired, or is another tenant's; None is any."""
        upload = self._read(upload_id) if _ID.fullmatch(upload_id) else None
        if upload is None or upload.expires <= time.time() or tenant not in (None, upload.tenant):
            raise NotFoundError(f"upload {upload_id!r} does not exist, is finished or has expired; start another one")
        return upload

    def directory(self, upload: Upload) -> Path:
        """Return the place of its files."""
        return self._home / upload.upload_id

    @contextmanager
    def receiving(self, upload: Upload, file: str, size: int) -> Iterator[BinaryIO]:
        """A file of `size` bytes to write to, which is there when the body ends, or not at all if it fails.

        Entering and leaving takes as long as the disk needs. Its bytes are taken from the disk at once, so that no
        others count on them.
        Raises BackpressureError while another request sends the same file, and if the disk, or what the tenant may
        store, has no room for it.
        """
        target = self.directory(upload) / file
        begun = target.with_name(f".{file}")
        refused = translated(OSError, TinsmithError, lambda error: f"{file} cannot be written: {error}; send it again")
        with refused, open(begun, "r+b", opener=_opened_or_made) as written:
            if not _is_alone(written, begun):
                raise BackpressureError(f"another request sends {file} of this upload; wait for it")
            try:
                written.truncate(0)
                self._take_room(upload, file, size, written)
                yield written
                written.flush()
                with renamed(begun, target):
                    pass
            except BaseException:
                begun.unlink(missing_ok=True)
                raise

    def _take_room(self, upload: Upload, file: str, size: int, written: BinaryIO) -> None:
        with self._alone():
            self._require_room(size, file)
            if upload.allowed_bytes is not None:
                replaced = self.directory(upload) / file
                own = [self.directory(other) for other in self._all() if other.tenant == upload.tenant]
                files = (path for place in own for path in place.glob("*") if path.stem != _ABOUT.stem)
                taken = sum(_sizes(path for path in files if path != replaced))
                if taken + size > upload.allowed_bytes:
                    raise BackpressureError(
                        f"{file} has {size:,} bytes and unfinished uploads of this tenant {taken:,}, and the key "
                        f"allows {upload.allowed_bytes:,} more; delete checkpoints, finish uploads, and start again"
                    )
            if size:
                os.posix_fallocate(written.fileno(), 0, size)

    def require_whole(self, upload: Upload) -> None:
        """Raise UserError unless all files are there, BackpressureError if a checkpoint of them has no room."""
        size = 0
        for file in UPLOAD_FILES:
            try:
                size += (self.directory(upload) / file).stat().st_size
            except FileNotFoundError:
                raise UserError(f"upload {upload.upload_id}: {file} is not there; PUT it to its URL first") from None
        self._require_room(size, "a checkpoint of files")

    def _require_room(self, size: int, what: str) -> None:
        """Raise BackpressureError if the disk has no room for these bytes and a checkpoint that is made of them."""
        if shutil.disk_usage(self._home).free < 2 * size + _LEFT_BYTES:
            raise BackpressureError(f"the disk has no room for {what} of {size:,} bytes; delete checkpoints there", 60)

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Make a checkpoint of an upload in the body. Raises BackpressureError while any process does that."""
        with open_lock(self._home / "import.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackpressureError("another upload is being finished; send the request again", 5) from None
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        make_directory(self._home)
        with open_lock(self._home / "room.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def end(self, upload: Upload) -> None:
        """Forget an upload with its files."""
        shutil.rmtree(self.directory(upload), ignore_errors=True)

    def sweep(self) -> None:
        """Forget uploads that expired an hour ago, and directories of that age that never became one."""
        for place in list(self._home.glob(_DIRECTORIES)):
            upload = self._read(place.name)
            with suppress(FileNotFoundError):
                last = place.stat().st_mtime if upload is None else upload.expires
                if last < time.time() - _KEPT_S:
                    shutil.rmtree(place, ignore_errors=True)

    def _all(self) -> Iterator[Upload]:
        return filter(None, (self._read(place.name) for place in self._home.glob(_DIRECTORIES)))

    def _read(self, upload_id: str) -> Upload | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return Upload(**json.loads((self._home / upload_id / _ABOUT).read_text()))
        return None


def _opened_or_made(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def _sizes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with suppress(FileNotFoundError):
            yield path.stat().st_size


def _is_alone(file: BinaryIO, path: Path) -> bool:
    """Lock a file, unless another process or request has, or has finished it meanwhile."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
