"""Signatures of download URLs, which give one file without an API key."""

import hashlib
import json
import secrets
import time
from pathlib import Path

import itsdangerous

from tinsmith.errors import ConfigError
from tinsmith.server.replies import ForbiddenError
from tinsmith.store.disk import renamed

_FILE_NAME = "signing.key"
_KEY_BYTES = 32


def _signing_key(data_dir: Path) -> bytes:
    """The key in a data directory, made if there is none. Raises ConfigError for a file of another size."""
    path = data_dir / _FILE_NAME
    if not path.exists():
        _write_privately(path, secrets.token_bytes(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} must hold {_KEY_BYTES} bytes, it holds {len(key)}; delete it, and a new one is made")
    return key


class UrlSigner:
    """Signs with a key in the data directory, readable by its owner alone. URLs outlive a restart of the server."""

    def __init__(self, data_dir: Path) -> None:
        """Make the key if there is none. Raises ConfigError for a file of another size."""
        key = _signing_key(data_dir)
        self._signer = itsdangerous.Signer(key, salt="tinsmith download", digest_method=hashlib.sha256)

    def sign(self, expires: int, *parts: str) -> str:
        """The signature of a URL for these parts that expires at `expires` (Unix time)."""
        return self._signer.get_signature(_message(expires, parts)).decode()

    def check(self, signature: str, expires: int, *parts: str) -> None:
        """Raise ForbiddenError unless `sign` made this signature and it has not expired."""
        if not self._signer.verify_signature(_message(expires, parts), signature.encode()):
            raise ForbiddenError("the signature of this URL is not valid; ask for a new URL")
        if expires <= time.time():
            raise ForbiddenError("this URL has expired; ask for a new one")


def _message(expires: int, parts: tuple[str, ...]) -> bytes:
    return json.dumps([expires, *parts]).encode()


def _write_privately(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    temporary.touch(0o600, exist_ok=False)
    with renamed(temporary, path):
        temporary.write_bytes(content)
