"""The first page: whether the server is well, what it does, and why its devices idle."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tinsmith.console.phases import IDLE, REASONS
from tinsmith.store.operations import QueuedOperation, ShownOperation
from tinsmith.store.records import Used, UsedBy

_WORK = ("backward", "forward", "optimizer", "sampling")
"""Activities of a device that does what clients want."""


def overview(
    about: Mapping[str, Any],
    queued: tuple[Sequence[QueuedOperation], int],
    failed: Sequence[ShownOperation],
    used: Iterable[UsedBy],
) -> dict[str, Any]:
    """Return what the page shows, of what the hub says `about` itself and the database has."""
    waiting, count = queued
    return {
        **about,
        "time_of_devices": time_of_devices(about["phases"]["workers"]),
        "queue": {"count": count, "oldest": [asdict(each) for each in waiting]},
        "last_errors": [asdict(each) for each in failed],
        "used_today": used_by_tenant(used),
    }


def time_of_devices(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the activities of all workers, longest first, with their share of the time and what it means."""
    sums: dict[str, float] = {}
    for worker in workers:
        for name, shares in worker["activities"].items():
            sums[name] = sums.get(name, 0.0) + sum(shares)
    total = sum(sums.values())
    return [
        {
            "activity": name,
            "share": value / total,
            "works": name in _WORK,
            "idles": name.startswith(IDLE),
            "reason": REASONS.get(name, ""),
        }
        for name, value in sorted(sums.items(), key=lambda each: -each[1])
        if value > 0
    ]


def used_by_tenant(used: Iterable[UsedBy]) -> list[dict[str, Any]]:
    """Return the sums of tenants, those with most tokens first."""
    sums: dict[str, Used] = {}
    stored: dict[tuple[str, str], int] = {}
    for each in used:
        sums[each.tenant] = sums.get(each.tenant, Used()).plus(each.used)
        key = each.tenant, each.base_model
        stored[key] = max(stored.get(key, 0), each.stored_bytes)
    return [
        {
            "tenant": tenant,
            **asdict(total),
            "tokens": total.tokens,
            "stored_bytes": sum(size for (owner, _), size in stored.items() if owner == tenant),
        }
        for tenant, total in sorted(sums.items(), key=lambda each: -each[1].tokens)
    ]
