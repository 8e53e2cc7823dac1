"""Checkpoints as an engine leaves them, for servers that have none."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.server.serving import Served
from tinsmith.store.records import Checkpoint, Outcome
from tinsmith.wire.paths import parse_path

SHAPE = {"rank": 8, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": False}


def save(server: Served, path: str, files: Mapping[str, bytes] | None = None, **fields: Any) -> Checkpoint:
    """A checkpoint at this path whose files hold these bytes. `fields` are those of its row."""
    contents = {"weights": b"0123456789"} if files is None else files
    place = server.hub.files.new_place()
    server.store.announce_checkpoint(place)
    with server.hub.files.written(place) as directory:
        for name, content in contents.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
    size = sum(map(len, contents.values()))
    parts = parse_path(path)
    row = Checkpoint(path, *parts, place, "tiny", "qwen3", SHAPE, parts.kind == "training", size, None, time.time(), None)
    row = replace(row, **fields)
    server.store.put_checkpoint(row)
    return row


async def new_run(server: Served, session_id: str | None = None, **fields: Any) -> str:
    """A model that is ready; returns its id. `fields` are those of create_model."""
    session_id = session_id or await server.new_session()
    lora = {"rank": 8, "seed": 0, "train_unembed": False}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora} | fields
    reply = await server.post("create_model", body)
    assert reply.status_code == 200, reply.text
    model_id: str = reply.json()["model_id"]
    server.finish(Outcome(f"{model_id}/0", b'{"model_id":""}', "json", None, None))
    return model_id
