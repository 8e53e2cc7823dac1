"""Files of adapters that clients upload, until a checkpoint is made of them.

    uploads/ID/upload.json    who uploads what, and until when
    uploads/ID/FILE           a file once it is complete, `.FILE` before

All processes that answer HTTP share the directory, and none keeps more of an upload.
"""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tinsmith.errors import BackpressureError, NotFoundError, TinsmithError, translated
from tinsmith.store.disk import make_directory, renamed

UPLOADS_DIR = "uploads"
"""Below a data directory."""
UPLOAD_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter as PEFT names them."""
_ABOUT = "upload.json"
_ID = re.compile(r"[0-9a-f]{32}")
_MOST, _MOST_OF_ONE = 64, 8
"""Unfinished uploads of all tenants, and of one."""


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


class Uploads:
    """The unfinished uploads of a data directory. For any thread and process."""

    def __init__(self, data_dir: Path) -> None:
        self._home = data_dir / UPLOADS_DIR

    def begin(
        self, tenant: str, base_model: str, lora_config: dict[str, Any], project_id: str | None, expires: int
    ) -> Upload:
        """Begin an upload. Raises BackpressureError if there are too many."""
        self.sweep()
        others = list(self._all())
        own = sum(upload.tenant == tenant for upload in others)
        if own >= _MOST_OF_ONE or len(others) >= _MOST:
            raise BackpressureError(
                f"{own} uploads of this tenant and {len(others)} in all are not finished, of at most {_MOST_OF_ONE} "
                f"and {_MOST}; finish some, or wait until they expire"
            )
        upload = Upload(uuid.uuid4().hex, tenant, base_model, lora_config, project_id, expires)
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
    def receiving(self, upload: Upload, file: str) -> Iterator[BinaryIO]:
        """A file to write to, which is there when the body ends, or not at all if it fails.

        Raises BackpressureError while another request sends the same file.
        """
        target = self.directory(upload) / file
        begun = target.with_name(f".{file}")
        refused = translated(OSError, TinsmithError, lambda error: f"{file} cannot be written: {error}; send it again")
        with refused, begun.open("ab") as written:
            if not _is_alone(written, begun):
                raise BackpressureError(f"another request sends {file} of this upload; wait for it")
            written.truncate(0)
            try:
                yield written
                written.flush()
                with renamed(begun, target):
                    pass
            finally:
                begun.unlink(missing_ok=True)

    def end(self, upload: Upload) -> None:
        """Forget an upload with its files."""
        shutil.rmtree(self.directory(upload), ignore_errors=True)

    def sweep(self) -> None:
        """Forget uploads that have expired, and directories that never became one."""
        now = time.time()
        for place in list(self._home.glob("*")):
            upload = self._read(place.name)
            with suppress(FileNotFoundError):
                if upload.expires <= now if upload is not None else place.stat().st_mtime < now - 3600:
                    shutil.rmtree(place, ignore_errors=True)

    def _all(self) -> Iterator[Upload]:
        return filter(None, (self._read(place.name) for place in self._home.glob("*")))

    def _read(self, upload_id: str) -> Upload | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return Upload(**json.loads((self._home / upload_id / _ABOUT).read_text()))
        return None


def _is_alone(file: BinaryIO, path: Path) -> bool:
    """Lock a file, unless another process or request has, or has finished it meanwhile."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
