"""`tinsmith keys`: makes, lists, rotates and revokes API keys, beside a server that runs too."""

import math
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.table import Table

from tinsmith.commands.tables import table
from tinsmith.config_values import SIZES
from tinsmith.errors import ConfigError
from tinsmith.store.keys import add_key, list_keys, revoke_key, rotate_key
from tinsmith.store.records import ApiKey
from tinsmith.store.store import Store, opened
from tinsmith.store.usage import stored_bytes

_NAME = re.compile(r"[\w.@-]{1,64}")
_DAY_S = 86400.0
_LONGEST_S = 36525 * _DAY_S
_MOST = 1e18
"""The largest limit: an integer of the database holds it."""
_UNITS = {"m": 60.0, "h": 3600.0, "d": _DAY_S, "w": 7 * _DAY_S}


def a_day(text: str, option: str) -> float:
    """The number in N or N/day. Raises ConfigError."""
    number = text.removesuffix("/day").replace("_", "").replace(",", "")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[0-9]+)?", number) or float(number) > _MOST:
        raise ConfigError(f"{option}={text!r} is no number a day of at most {_MOST:.0e}, such as 2000000/day")
    return float(number)


def size_of(text: str) -> int:
    """The bytes of a size such as 50GiB; a number is in GiB. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]iB)?", text)
    size = float(found[1]) * SIZES[found[2] or "GiB"] if found else math.inf
    if size > _MOST:
        raise ConfigError(f"--storage={text!r} is no size of at most {_MOST:.0e} bytes, such as 50GiB")
    return int(size)


def seconds_of(text: str, option: str) -> float:
    """The seconds of a time such as 90d or 12h. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]+)([mhdw])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if seconds > _LONGEST_S:
        raise ConfigError(f"{option}={text!r} is no time such as 90d, 12h, 30m or 4w, of at most 100 years")
    return seconds


def add(data_dir: Path, key: ApiKey) -> str:
    """Add a key, and return its text. A data directory is made if there is none. Raises ConfigError."""
    for what, name in (("NAME", key.name), ("--tenant", key.tenant)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{what}={name!r} must have 1 to 64 letters, digits or . _ - @")
    with closing(Store.open(data_dir)) as store:
        return add_key(store, key)


def rotate(data_dir: Path, name: str) -> str:
    """Give a key a new secret, and return its text. Raises ConfigError as `rotate_key`."""
    with opened(data_dir) as store:
        return rotate_key(store, name)


def revoke(data_dir: Path, name: str) -> None:
    """End a key. Raises ConfigError as `revoke_key`."""
    with opened(data_dir) as store:
        revoke_key(store, name)


def listed(data_dir: Path) -> Table | str:
    """A table of all keys."""
    with opened(data_dir) as store:
        keys, stored = list_keys(store), stored_bytes(store)
    columns = ("name", "tenant", "role", "key", "state", "MiB stored", "limits")
    rows = [
        (k.name, k.tenant, k.role, f"tml-{k.key_id}-...", _state(k), f"{stored[k.tenant] / 2**20:,.1f}", limits)
        for k, limits in ((key, ", ".join(_limits(key))) for key in keys)
    ]
    return table(rows, columns) if rows else "there are no keys: the server serves this machine only, and asks for none"


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'expired' if key.expires_at <= time.time() else 'valid until'} {_day(key.expires_at)}"


def _day(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix))


def _limits(key: ApiKey) -> Iterator[str]:
    if key.models is not None:
        yield f"models {' '.join(key.models)}"
    if key.max_models is not None:
        yield f"{key.max_models:,} models"
    if key.max_parallel is not None:
        yield f"{key.max_parallel:,} in parallel"
    if key.tokens_a_day is not None:
        yield f"{key.tokens_a_day:,} tokens/day"
    if key.gpu_seconds_a_day is not None:
        yield f"{key.gpu_seconds_a_day:,g} GPU-seconds/day"
    if key.storage_bytes is not None:
        yield f"{key.storage_bytes / 2**30:,.3g} GiB"
    if key.kept_checkpoints is not None:
        yield f"{key.kept_checkpoints:,} checkpoints of a run"
    if key.checkpoint_ttl_s is not None:
        yield f"checkpoints for {key.checkpoint_ttl_s / 3600:,.4g} h"
