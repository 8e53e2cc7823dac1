"""Pages of operations: the log, and one operation's life; and of settings, keys and budgets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from tinsmith.config import Config
from tinsmith.config_values import settings_of
from tinsmith.observing.spans import OPERATIONS, PASSES, Span
from tinsmith.store.operations import ShownOperation
from tinsmith.store.records import ApiKey, CommandKind, Used, UsedBy

KINDS: tuple[str, ...] = get_args(CommandKind)
STATUSES = ("queued", "done", "failed")
"""Kinds and states that the log is searched for."""
_MOST_PASSES = 60
_SHORTEST_S = 0.0005
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def describe_operation(found: ShownOperation) -> dict[str, Any]:
    """Return an operation as the log shows it. One whose result is dropped was done."""
    seconds = None if found.finished_at is None else found.finished_at - found.created_at
    return asdict(found) | {"status": "done" if found.status == "dropped" else found.status, "seconds": seconds}


def describe_life(found: ShownOperation, spans: Sequence[Span]) -> dict[str, Any]:
    """Return an operation with the parts of its life, each by the seconds since it came at which it began."""
    began = found.created_at
    bars: list[dict[str, Any]] = []
    for _, track, at, seconds, facts in spans:
        if track == OPERATIONS:
            bars.append(_bar("queued", "queued", 0.0, facts["queued_s"], "until its first part is computed"))
            ran = seconds - facts["queued_s"]
            bars.append(_bar("computed", "run", at - began + facts["queued_s"], ran, "until its result was there"))
    passes = [span for span in spans if span[1] == PASSES]
    for name, _, at, seconds, facts in passes[:_MOST_PASSES]:
        others = len(facts["requests"]) - 1
        shared = f", shared with {others} other operation{'' if others == 1 else 's'}" if others else ""
        told = f"{facts['tokens']:,} tokens on worker {facts['worker']}{shared}"
        bars.append(_bar(name, name, at - began, seconds, told))
    ended = None if found.finished_at is None else found.finished_at - began
    if ended is not None:
        computed = max((bar["begins_s"] + bar["seconds"] for bar in bars), default=0.0)
        if ended - computed > _SHORTEST_S:
            bars.append(
                _bar("recorded" if bars else "all", "other", computed, ended - computed, "until it was in the log")
            )
    length = max((bar["begins_s"] + bar["seconds"] for bar in bars), default=0.0)
    return describe_operation(found) | {"bars": bars, "length_s": length, "passes": len(passes)}


def _bar(name: str, kind: str, begins_s: float, seconds: float, told: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "begins_s": max(0.0, begins_s), "seconds": max(0.0, seconds), "told": told}


def describe_settings(config: Config) -> list[dict[str, Any]]:
    """Return the settings in force by section, and whether each is other than its default."""
    defaults = {setting.path: setting.default for setting in settings_of(Config())}
    return [
        {
            "section": setting.path[0] if len(setting.path) > 1 else "",
            "name": setting.name,
            "option": setting.option,
            "value": _PASSWORD.sub("…", _told(setting.default)),
            "unit": setting.info.unit,
            "help": setting.info.help,
            "changed": setting.default != defaults[setting.path],
        }
        for setting in settings_of(config)
    ]


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def describe_keys(
    keys: Iterable[ApiKey], used: Iterable[UsedBy], stored: Mapping[str, int], now: float
) -> list[dict[str, Any]]:
    """Return the keys by tenant, without what is secret, and how much of its budgets each tenant has used today."""
    sums: dict[str, Used] = {}
    for each in used:
        sums[each.tenant] = sums.get(each.tenant, Used()).plus(each.used)
    return [
        {
            "name": key.name,
            "tenant": key.tenant,
            "role": key.role,
            "state": _state(key, now),
            "models": key.models,
            "max_models": key.max_models,
            "max_parallel": key.max_parallel,
            "created_at": key.created_at,
            "expires_at": key.expires_at,
            "budgets": [
                {"of": name, "used": amount, "limit": limit}
                for name, amount, limit in (
                    ("tokens", sums.get(key.tenant, Used()).tokens, key.tokens_a_day),
                    ("gpu_seconds", sums.get(key.tenant, Used()).gpu_seconds, key.gpu_seconds_a_day),
                    ("storage", stored.get(key.tenant, 0), key.storage_bytes),
                )
                if limit is not None
            ],
        }
        for key in sorted(keys, key=lambda key: (key.tenant, key.name))
    ]


def _state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "valid"
