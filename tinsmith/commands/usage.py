"""`tinsmith usage`: what tenants have used, from the database of a data directory, beside its server too."""

import time
from collections import defaultdict
from pathlib import Path

from rich.table import Table

from tinsmith.commands.tables import table
from tinsmith.store.records import Used
from tinsmith.store.store import opened
from tinsmith.store.usage import DAY_S, used_between

_COLUMNS = ("tenant", "base model", "trained", "prefilled", "cached", "sampled", "GPU-seconds", "MiB stored")


def usage(data_dir: Path, days: int, by_hour: bool) -> Table | str:
    """A table of so many days until now, in UTC: tokens by what was done with them, and the most that was stored."""
    now = time.time()
    start = (int(now) // DAY_S - days + 1) * DAY_S
    with opened(data_dir) as store:
        found = used_between(store, start, now + DAY_S)
    sums: defaultdict[tuple[str, str, str], Used] = defaultdict(Used)
    stored: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for each in found:
        hour = time.strftime("%Y-%m-%d %H:00", time.gmtime(each.hour)) if by_hour else ""
        key = hour, each.tenant, each.base_model
        sums[key] = sums[key].plus(each.used)
        stored[key] = max(stored[key], each.stored_bytes)
    columns = ("hour", *_COLUMNS) if by_hour else _COLUMNS
    rows = [_row(key if by_hour else key[1:], used, stored[key]) for key, used in sorted(sums.items())]
    return table(rows, columns) if rows else f"nothing was used since {time.strftime('%Y-%m-%d', time.gmtime(start))}"


def _row(names: tuple[str, ...], used: Used, stored: int) -> tuple[str, ...]:
    tokens = used.trained_tokens, used.prefilled_tokens, used.cached_tokens, used.sampled_tokens
    return (*names, *(f"{count:,}" for count in tokens), f"{used.gpu_seconds:,.1f}", f"{stored / 2**20:,.1f}")
