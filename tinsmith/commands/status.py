"""`tinsmith status`: asks a server what it does, and prints that."""

import json
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith.commands.tables import table
from tinsmith.errors import ConfigError, printable, translated
from tinsmith.http_client import open_url, why_unanswered, without_user

TIMEOUT_S = 10.0


def fetch_status(url: str, key: str = "") -> dict[str, Any]:
    """The answer of the status route to a client with this key. Raises ConfigError if no Tinsmith server gives one."""
    return {printable(name): _escaped(value) for name, value in fetch(url, "status", key, "engine").items()}


def fetch(url: str, path: str, key: str, has: str) -> dict[str, Any]:
    """The answer of a route to a client with this key, an object that `has` a member. Raises as `fetch_status`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url={without_user(url)!r} must begin with http:// or https://")
    shown = without_user(url)

    def why_none(error: Exception) -> str:
        if not isinstance(error, HTTPError):
            return f"no Tinsmith server answers at {shown}: {why_unanswered(error)}; `tinsmith ping` says what to do"
        if error.code == 403:
            return f"{shown} needs the API key of an admin for this: set TINKER_API_KEY, or give --api-key"
        if error.code == 401:
            return f"{shown} needs an API key that it knows: set TINKER_API_KEY, or give --api-key"
        hint = " Leave out /api/v1" if url.rstrip("/").endswith("/api/v1") else ""
        return f"{shown} answers {error.code}: is it a Tinsmith server?{hint}"

    no_answer = (OSError, ValueError, HTTPException)  # of nobody, or none that is HTTP or JSON
    place, headers = f"{url.rstrip('/')}/api/v1/{path}", {"X-API-Key": key} if key else None
    with translated(no_answer, ConfigError, why_none), open_url(place, TIMEOUT_S, headers) as reply:
        content = json.load(reply)
    if not isinstance(content, dict) or has not in content:
        raise ConfigError(f"no Tinsmith server answers at {shown}: the answer has no key {has!r}")
    return content


def _escaped(content: Any) -> Any:
    if isinstance(content, dict):
        return {printable(name): _escaped(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_escaped(each) for each in content]
    return printable(content) if isinstance(content, str) else content


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print an answer. Names become `Text`, which Rich reads no markup in."""
    engine, samples, rates = status["engine"], status["samples"], status["tokens_per_second"]
    reason = f": {engine['reason']}" if engine["reason"] else ""
    busy = f", busy with one task for {engine['busy_s']:,.0f} s" if engine["busy_s"] >= 1 else ""
    state = engine["reason"] if engine["state"] == "starting" else f"engine {engine['state']}{reason}{busy}"
    console.print(Text(f"Tinsmith {status['version']}, {state}"))
    if workers := status.get("workers"):  # an engine that has not reported yet names none
        processes = [
            (str(worker["pid"]), worker["device"], worker["state"], f"{worker.get('pass_tokens', 0):,}")
            for worker in workers
        ]
        console.print(_table("workers", ("process", "device", "state", "tokens of passes"), processes))
    console.print(
        _table(
            "base models",
            ("name", "architecture", "context", "images"),
            [_base(base) for base in status["base_models"]],
        )
    )
    rows = [(m["model_id"], m["base_model"], f"{m['queued']:,}", f"{m['trained_tokens']:,}") for m in status["models"]]
    if status.get("trains", True):
        console.print(_table("loaded models", ("model", "base model", "queued", "tokens trained"), rows))
    else:
        console.print("it samples only (--train none)")
    console.print(f"samples: {samples['running']:,} running, {samples['waiting']:,} waiting")
    console.print(
        f"tokens per second, last minute: {rates['training']:,.1f} training, {rates['sampling']:,.1f} sampling"
    )
    shares = sorted(status.get("worker_time", {}).items(), key=lambda each: -each[1])
    time = ", ".join(f"{share:.0%} {activity}" for activity, share in shares if share >= 0.005)
    console.print(Text(f"time of workers, last minute: {time or 'not reported yet'}"))
    memory = ", ".join(f"{size / 2**20:,.0f} MiB {place}" for place, size in status["memory_bytes"].items())
    console.print(Text(f"engine memory: {memory or 'not reported yet'}"))
    graphs = ", ".join(f"{count:,} {kind}" for kind, count in status["graphs"].items())
    console.print(Text(f"graphs of operations: {graphs or 'not reported yet'}"))
    if paging := status.get("paging"):
        console.print(
            f"LoRA models: {paging['on_device']:,} on the device, {paging['in_host_memory']:,} in host memory "
            f"({paging['host_bytes'] / 2**20:,.0f} MiB); {paging['page_ins']:,} page-ins and "
            f"{paging['page_outs']:,} page-outs took {paging['milliseconds'] / 1000:,.1f} s"
        )


def _base(base: dict[str, Any]) -> tuple[str, ...]:
    return base["name"], base["architecture"], f"{base['max_context']:,}", "yes" if base["takes_images"] else "no"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table | str:
    return table(rows, columns, title) if rows else f"{title}: none"
