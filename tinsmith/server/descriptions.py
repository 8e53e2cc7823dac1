"""Runs, checkpoints and sessions as the REST part of the API describes them."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tinsmith.store.catalog import SessionSummary
from tinsmith.store.records import CLIENT_REASONS, Checkpoint, TrainingRun
from tinsmith.wire.paths import parse_path

NO_PROJECT = "default"
"""The API's name for the project of sessions without one."""


def timestamp(unix: float) -> str:
    """A Unix time in ISO 8601, UTC."""
    return datetime.fromtimestamp(unix, UTC).isoformat()


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as the API lists it; `base_model` is for SDKs from 0.39 on."""
    return {
        "base_model": checkpoint.base_model,
        "checkpoint_id": parse_path(checkpoint.tinker_path).checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": timestamp(checkpoint.created_at),
        "tinker_path": checkpoint.tinker_path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else timestamp(checkpoint.expires_at),
    }


def describe_run(run: TrainingRun, base_model: str) -> dict[str, Any]:
    """A training run as the API lists it.

    `status`, which the SDK's type lacks, tells lost, finished and unloaded models apart.
    """
    rank = run.model.lora_config["rank"]
    return {
        "training_run_id": run.model.model_id,
        "base_model": base_model,
        "model_owner": run.tenant,
        "is_lora": rank > 0,
        "status": run.model.status,
        "corrupted": run.model.status in ("failed", "lost"),
        "lora_rank": rank or None,
        "last_request_time": timestamp(run.last_request_at),
        "last_checkpoint": describe_checkpoint(run.last_training) if run.last_training else None,
        "last_sampler_checkpoint": describe_checkpoint(run.last_sampler) if run.last_sampler else None,
        "user_metadata": as_texts(run.model.user_metadata),
    }


def describe_weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint for a client that wants to load it."""
    shape = checkpoint.lora_config
    described = {
        "base_model": checkpoint.base_model,
        "is_lora": shape["rank"] > 0,
        "optimizer_config": {"type": "adamw"},
    }
    if shape["rank"] > 0:
        described["lora_rank"] = shape["rank"]
        described |= {name: shape[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return described


def describe_session(found: SessionSummary) -> dict[str, Any]:
    """A session as a search returns it."""
    return {
        "session_id": found.session_id,
        "created_at": timestamp(found.created_at),
        "owner": found.tenant,
        "project_id": found.project_id or NO_PROJECT,
        "status": _status(found),
        "checkpoints_count": found.checkpoints,
        "checkpoint_storage_bytes": found.checkpoint_bytes,
        "display_name": found.display_name,
        "user_metadata": as_texts(found.user_metadata),
    }


def _status(found: SessionSummary) -> dict[str, Any] | None:
    if found.finished_at is None:
        return {"type": "active"}
    if found.finish_reason in CLIENT_REASONS:
        return {"type": "client_finished", "reason": {"type": found.finish_reason}, "detail": found.finish_detail}
    return None


def as_texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata with text values only, as replies carry it: other values become JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
