"""Pages of training runs: the list, one run, and several compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from tinsmith.console.curves import FIRST, Curves, meaning
from tinsmith.store.operations import MetricsRow, RunOrigin
from tinsmith.store.records import Checkpoint, TrainingRun
from tinsmith.wire.paths import parse_path

SMOOTHING = (0.0, 0.6, 0.9, 0.97, 0.99)
"""Weights of what came before, that a page offers."""
MOST_COMPARED = 4


def describe_row(run: TrainingRun, last: MetricsRow | None) -> dict[str, Any]:
    """Return a run as the list shows it; `last` has the metrics of its last forward and backward pass."""
    loss = None
    if last is not None and last.tokens:
        loss = float(orjson.loads(last.metrics).get("loss:sum", "nan")) / last.tokens
    model = run.model
    return {
        "model_id": model.model_id,
        "tenant": run.tenant,
        "base_model": model.base_model,
        "status": model.status,
        "rank": model.lora_config["rank"],
        "operations": model.applied_seq,
        "last_request_at": run.last_request_at,
        "loss_per_token": loss if loss is not None and math.isfinite(loss) else None,
        "checkpoint": (run.last_training or run.last_sampler) and newest(run).tinker_path,
        "user_metadata": model.user_metadata or {},
    }


def newest(run: TrainingRun) -> Checkpoint:
    """Return the newest checkpoint of a run that has one."""
    return max(filter(None, (run.last_training, run.last_sampler)), key=lambda each: each.created_at)


def describe_checkpoint(found: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as the page of its run shows it."""
    parts = parse_path(found.tinker_path)
    return {
        "tinker_path": found.tinker_path,
        "kind": found.kind,
        "name": parts.name,
        "checkpoint_id": parts.checkpoint_id,
        "size_bytes": found.size_bytes,
        "has_optimizer": found.has_optimizer,
        "created_at": found.created_at,
        "expires_at": found.expires_at,
        "public": found.public,
        "user_metadata": found.user_metadata or {},
    }


def describe_run(
    run: TrainingRun,
    session: Mapping[str, Any],
    curves: Curves,
    checkpoints: Sequence[Checkpoint],
    lineage: tuple[Sequence[RunOrigin], Sequence[RunOrigin]],
) -> dict[str, Any]:
    """Return a run with its configuration, last metrics, checkpoints, and where it comes from and led to."""
    model = run.model
    origins, offspring = lineage
    return {
        **describe_row(run, None),
        "session_id": model.session_id,
        "session": dict(session),
        "lora": dict(model.lora_config),
        "optimizer": dict(model.optimizer_config),
        "steps": curves.steps,
        "last": _finite(curves.last),
        "metrics": describe_metrics([curves]),
        "checkpoint_count": len(checkpoints),
        "checkpoints": [describe_checkpoint(each) for each in checkpoints],
        "origins": [vars(each) for each in origins],
        "offspring": [vars(each) for each in offspring],
    }


def describe_metrics(runs: Sequence[Curves], more: Iterable[str] = ()) -> list[dict[str, str]]:
    """Return the metrics that one of these runs has, those that all have sooner or later, and `more`, with meanings."""
    known = {name for curves in runs for name in curves.names} | set(more)
    return [{"name": name, "meaning": meaning(name)} for name in [*FIRST, *sorted(known - set(FIRST))]]


def describe_comparison(runs: Sequence[TrainingRun], curves: Sequence[Curves]) -> dict[str, Any]:
    """Return several runs beside each other: what differs in their configurations, and their last metrics."""
    configurations = [_configuration(run) for run in runs]
    names = sorted({name for each in configurations for name in each})
    rows = [{"name": name, "values": [each.get(name) for each in configurations]} for name in names]
    return {
        "runs": [describe_row(run, None) | {"steps": each.steps} for run, each in zip(runs, curves, strict=True)],
        "differences": [row for row in rows if any(value != row["values"][0] for value in row["values"])],
        "same": [row for row in rows if all(value == row["values"][0] for value in row["values"])],
        "metrics": describe_metrics(curves),
        "last": [_finite(each.last) for each in curves],
    }


def _configuration(run: TrainingRun) -> dict[str, Any]:
    model = run.model
    parts = {"lora": model.lora_config, "optimizer": model.optimizer_config, "metadata": model.user_metadata or {}}
    told = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    return {"base_model": model.base_model, **told}


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
