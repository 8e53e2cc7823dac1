"""Signed, expiring addresses of files: whoever has one can fetch that file until then, without a key, and no other."""

import hashlib
import hmac
import json
import os
import secrets
import time
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.server.replies import ForbiddenError

_FILE_NAME = "signing.key"
_KEY_BYTES = 32


class Signer:
    """Signs with a key of the data directory that nobody else can read. The key stays, so addresses outlive a restart."""

    def __init__(self, data_dir: Path) -> None:
        """Make the key if there is none. Raises ConfigError for a key that is not one."""
        path = data_dir / _FILE_NAME
        if not path.exists():
            _write_privately(path, secrets.token_bytes(_KEY_BYTES))
        self._key = path.read_bytes()
        if len(self._key) != _KEY_BYTES:
            raise ConfigError(f"{path} must hold {_KEY_BYTES} bytes, it holds {len(self._key)}; delete it, and a new one is made")

    def sign(self, expires: int, *parts: str) -> str:
        """The signature of an address that names these things and ends at `expires` (Unix time)."""
        message = json.dumps([expires, *parts]).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def check(self, signature: str, expires: int, *parts: str) -> None:
        """Raise ForbiddenError unless `sign` made this signature and its time is not over."""
        if not hmac.compare_digest(signature.encode(), self.sign(expires, *parts).encode()):
            raise ForbiddenError("the signature of this address is not ours; ask for a new one")
        if expires <= time.time():
            raise ForbiddenError("this address has expired; ask for a new one")


def _write_privately(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)
