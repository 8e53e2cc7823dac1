"""API keys, and logins with them: made here, kept as digests. Keys are compared in constant time.

A key is `tml-ID-SECRET`, as the SDK wants it to begin. Each function of the table is one transaction; a server reads
what another process writes (`tinsmith keys`).
"""

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from sqlalchemy import delete, or_, select, update

from tinsmith.errors import ConfigError, UserError
from tinsmith.store.database import Transactions
from tinsmith.store.records import ApiKey
from tinsmith.store.schema import api_keys, logins
from tinsmith.store.store import Store

LOGIN_S = 30 * 86400
"""Seconds after which people log in again."""
MOST_LOGINS = 100
"""Logins with one key at a time: one more ends the oldest."""
_PREFIX = "tml-"
_NOBODY = bytes(32)
"""The digest that an unknown key is compared with."""
_COLUMNS = [api_keys.c[name] for name in ApiKey.__dataclass_fields__]


def new_secret(key: ApiKey) -> tuple[ApiKey, str]:
    """`key` with a new id and digest, and its text, which is kept nowhere."""
    key_id = secrets.token_hex(4)
    text = f"{_PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    return replace(key, key_id=key_id, digest=_digest(text)), text


def find_key(known: Mapping[str, ApiKey], text: str) -> ApiKey | None:
    """The key of this text among those `known` by id. A wrong one takes as long as a right one."""
    key = known.get(text.removeprefix(_PREFIX).partition("-")[0])
    is_right = hmac.compare_digest(_digest(text), _NOBODY if key is None else key.digest)
    return key if is_right else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def list_keys(store: Store) -> list[ApiKey]:
    """All keys, revoked ones too, by name."""
    with store.reading() as connection:
        return [ApiKey(*row) for row in connection.execute(select(*_COLUMNS).order_by(api_keys.c.name))]


@dataclass(frozen=True)
class Retention:
    """What the living keys of a tenant allow to be stored; None if one of them has no limit."""

    tenant: str
    storage_bytes: int | None
    kept_checkpoints: int | None
    checkpoint_ttl_s: float | None

    def ttl_s(self, asked: float | None) -> float | None:
        """Seconds that a checkpoint lives, for which `asked` is wanted. Raises UserError if that is longer."""
        if self.checkpoint_ttl_s is None or asked is None:
            return self.checkpoint_ttl_s if asked is None else asked
        if asked > self.checkpoint_ttl_s:
            shown = "null" if asked == math.inf else f"{asked:g}"
            raise UserError(
                f"ttl_seconds={shown} is longer than the {self.checkpoint_ttl_s:g} s for which the keys of tenant "
                f"{self.tenant!r} let checkpoints live; send at most that, or none"
            )
        return asked


def retention_of(store: Transactions, tenant: str) -> Retention:
    """What the living keys of a tenant allow to be stored."""
    now = time.time()
    living = api_keys.c.revoked_at.is_(None), or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now)
    columns = api_keys.c.storage_bytes, api_keys.c.kept_checkpoints, api_keys.c.checkpoint_ttl_s
    with store.reading() as connection:
        found = connection.execute(select(*columns).where(api_keys.c.tenant == tenant, *living)).all()
    limits = [None if not each or None in each else max(each) for each in zip(*found, strict=True)] or [None] * 3
    return Retention(tenant, *limits)


def add_key(store: Store, key: ApiKey) -> str:
    """Add a key, and return its text. Raises ConfigError if there is one of that name."""
    added, text = new_secret(replace(key, created_at=time.time()))
    with store.writing_if_there() as connection:
        if connection.execute(select(api_keys.c.name).where(api_keys.c.name == key.name)).first() is not None:
            raise ConfigError(f"there is a key {key.name!r} already; choose another name, or rotate that one")
        connection.execute(api_keys.insert(), vars(added))
    return text


def rotate_key(store: Store, name: str) -> str:
    """Give a key a new secret, and return its text; the old one ends. Raises ConfigError: no such key, or revoked."""
    key = _require(store, name)
    if key.revoked_at is not None:
        raise ConfigError(f"the key {name!r} is revoked; add another one")
    rotated, text = new_secret(key)
    with store.writing_if_there() as connection:
        connection.execute(
            update(api_keys)
            .where(api_keys.c.name == name, api_keys.c.revoked_at.is_(None))
            .values(key_id=rotated.key_id, digest=rotated.digest)
        )
    return text


def revoke_key(store: Store, name: str) -> None:
    """End a key. Its tenant keeps what it has. Raises ConfigError if there is no such key."""
    key = _require(store, name)
    with store.writing_if_there() as connection:
        connection.execute(
            update(api_keys).where(api_keys.c.name == name).values(revoked_at=key.revoked_at or time.time())
        )


def _require(store: Store, name: str) -> ApiKey:
    found = next((key for key in list_keys(store) if key.name == name), None)
    if found is None:
        raise ConfigError(f"there is no key {name!r}; `tinsmith keys list` lists them")
    return found


# ---- Logins


def begin_login(store: Store, key_id: str) -> str:
    """Note a login with a key, and return the text that stands for it. Nothing of the text can be read again."""
    text, now = secrets.token_urlsafe(32), time.time()
    older = select(logins.c.digest).where(logins.c.key_id == key_id).order_by(logins.c.began_at.desc())
    with store.writing() as connection:
        connection.execute(delete(logins).where(logins.c.digest.in_(older.offset(MOST_LOGINS - 1))))
        connection.execute(delete(logins).where(logins.c.key_id == key_id, logins.c.began_at <= now - LOGIN_S))
        connection.execute(logins.insert().values(digest=_digest(text), key_id=key_id, began_at=now))
    return text


def find_login(store: Store, text: str) -> str | None:
    """The key, by its part that is no secret, of a login that has not ended."""
    found = select(logins.c.key_id).where(logins.c.digest == _digest(text), logins.c.began_at > time.time() - LOGIN_S)
    with store.reading() as connection:
        return connection.execute(found).scalar()


def living_logins(store: Store, texts: Collection[str]) -> set[str]:
    """Those of these texts whose logins have not ended."""
    known = {_digest(text): text for text in texts}
    found = select(logins.c.digest).where(logins.c.digest.in_(known), logins.c.began_at > time.time() - LOGIN_S)
    with store.reading() as connection:
        return {known[bytes(digest)] for digest in connection.execute(found).scalars()}


def end_login(store: Store, text: str) -> None:
    """End a login, if it has not ended."""
    with store.writing() as connection:
        connection.execute(delete(logins).where(logins.c.digest == _digest(text)))
