"""The first page: whether the server is well, what it does, and why its devices idle."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from tinsmith.console.pages import short
from tinsmith.console.phases import IDLE, REASONS
from tinsmith.console.samples import KeptSample, label_of
from tinsmith.store.operations import QueuedOperation, ShownOperation
from tinsmith.store.records import Used, UsedBy

_WORK = ("backward", "forward", "optimizer", "sampling")
"""Activities of a device that does what clients want."""


def overview(
    about: Mapping[str, Any],
    queued: tuple[Sequence[QueuedOperation], int],
    failures: Sequence[Mapping[str, Any]],
    used: Iterable[UsedBy],
) -> dict[str, Any]:
    """Return what the page shows, of what the hub says `about` itself and the database has; errors as `last_errors`."""
    waiting, count = queued
    return {
        **about,
        "time_of_devices": time_of_devices(about["phases"]["workers"]),
        "queue": {"count": count, "oldest": [asdict(each) for each in waiting]},
        "last_errors": list(failures),
        "used_today": used_by_tenant(used),
    }


def last_errors(operations: Iterable[ShownOperation], samples: Iterable[KeptSample]) -> list[dict[str, Any]]:
    """Return operations and samples that failed, the newest first, each with the page that has more of it."""
    found = [
        {
            **asdict(each),
            "url": f"/operations/{quote(each.model_id, safe='')}/{each.seq_id}",
            "label": f"{short(each.model_id)}/{each.seq_id}",
        }
        for each in operations
    ]
    found += [
        {
            "kind": "sample",
            "finished_at": each.ended_at,
            "error": each.error,
            "category": each.category,
            "tenant": each.tenant,
            "url": each.url,
            "label": label_of(each.weights_id or each.base_model),
        }
        for each in samples
    ]
    return sorted(found, key=lambda each: -each["finished_at"])


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
