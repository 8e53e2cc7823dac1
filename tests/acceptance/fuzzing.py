"""Requests of every kind, for the fuzz run: right ones, right ones with something wrong in them, and garbage.

A body names what it is about by a placeholder, `{model}` or `{seq}`, which is filled in when it is sent. All are drawn
from one `Random`.
"""

import base64
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
import zstandard

from tests.acceptance.bad_training import tensor
from tests.bases import png
from tinsmith.wire import tinker_pb2 as pb

NASTY: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    3,
    0.5,
    -0.5,
    2**31,
    2**63,
    2**64,
    2**70,
    -(2**70),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\0",
]
NASTY += [
    "..",
    "a/b",
    "a\nb",
    "\ud800",
    "x" * 300,
    "ü",
    "text",
    "vision",
    "tinker://a/b/c",
    [],
    {},
    [[]],
    {"a": None},
    [-1, 2],
    [3] * 4,
]
NASTY += ["{session}", "{ending}", "{model}", "{eye}", "{sampler}", "{eye_sampler}", "tinker://{model}/weights/kept"]
TEXT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}
IMAGE = {"type": "image", "data": base64.b64encode(png(0)).decode(), "format": "png", "expected_tokens": 6}
SEEN = {"chunks": [*TEXT["chunks"], IMAGE]}
SAMPLE = {
    "sampling_session_id": "{sampler}",
    "seq_id": "{sample}",
    "prompt": TEXT,
    "sampling_params": {"max_tokens": 3},
}
ADAMW = {"type": "adamw"}
STEP = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
KEPT = "tinker://{model}/weights/kept"
TARGETS = {
    "data": [5, 6, 7],
    "dtype": "int64",
    "shape": [3, 2],
    "sparse_crow_indices": [0, 1, 2, 3],
    "sparse_col_indices": [0, 1, 0],
}

CHATS: list[dict[str, Any]] = [
    {"model": "text", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0.5, "n": 2},
    {"model": "live:{model}", "messages": [{"role": "system", "content": "a"}], "max_tokens": 3, "stream": True},
    {
        "model": "tinker://{model}/sampler_weights/kept",
        "messages": [{"role": "assistant", "content": "a", "name": "b"}],
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["a", "b"],
        "seed": 3,
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"model": "tinker://{model}/sampler_weights/kept", "prompt": "a", "max_tokens": 3, "logprobs": 1, "top_k": 5},
    {"model": "text:peft:32", "prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}},
]
MESSAGES: list[dict[str, Any]] = [
    {"model": "live:{model}", "messages": [{"role": "user", "content": "a"}], "system": "b"},
    {
        "model": "tinker://{model}/sampler_weights/kept",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
    },
]
OUTSIDE = (
    *(
        "v1/",
        "oai/",
        "anthropic/",
        "static/",
        "login",
        "logout",
        "overview",
        "curves.json",
        "runs",
        "operations",
        "settings",
    ),
    *("samples", "sample-images/", "rollouts", "rollout-images/", "playground"),
)
"""Beginnings of routes that do not lie below the Tinker API."""

BODIES: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("v1/chat/completions", "oai/api/v1/chat/completions"), CHATS),
    **dict.fromkeys(("v1/completions", "oai/api/v1/completions"), COMPLETIONS),
    "anthropic/api/v1/messages": [each | {"max_tokens": 3, "stop_sequences": ["a"]} for each in MESSAGES],
    "anthropic/api/v1/messages/count_tokens": MESSAGES,
    "client/config": [{"sdk_version": "0.38.0"}],
    "client/dynamic_config": [{"sdk_version": "0.38.0"}],
    "telemetry": [{"events": [], "platform": "x", "session_id": "{session}"}],
    "create_session": [
        {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "project_id": "p", "display_name": "d"}
    ],
    "session_heartbeat": [{"session_id": "{session}", "type": "session_heartbeat"}],
    "sessions/{session_id}/finish": [{"reason": {"type": "success"}, "detail": None}],
    "create_model": [
        {
            "session_id": "{session}",
            "model_seq_id": 5,
            "base_model": "text",
            "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        },
        {
            "session_id": "{session}",
            "model_seq_id": 6,
            "base_model": "text",
            "user_metadata": {"a": 1},
            "optimizer_config": ADAMW,
        },
    ],
    "get_info": [{"model_id": "{model}", "type": "get_info"}],
    "optim_step": [
        {"model_id": model, "seq_id": seq, "adam_params": STEP}
        for model, seq in (("{model}", "{seq}"), ("{eye}", "{eye_seq}"))
    ],
    "save_weights": [
        {
            "model_id": "{model}",
            "seq_id": "{seq}",
            "path": "a",
            "ttl_seconds": 3600,
            "overwrite": True,
            "user_metadata": {},
        }
    ],
    "save_weights_for_sampler": [
        {"model_id": "{model}", "seq_id": "{seq}", "path": "a", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
        {"model_id": "{model}", "seq_id": "{seq}", "sampling_session_seq_id": 3, "kind": "snapshot"},
        {"model_id": "{model}", "seq_id": "{seq}", "sampling_session_seq_id": 4, "kind": "inflight"},
    ],
    "save_weights_external": [
        {"model_id": "{model}", "seq_id": "{seq}", "path": "a", "ttl_seconds": 3600, "age_encryption_recipients": ["a"]}
    ],
    "load_weights": [
        {
            "session_id": "{session}",
            "model_seq_id": 7,
            "path": KEPT,
            "optimizer": True,
            "base_model": "text",
            "user_metadata": {"a": 1},
        },
        {"model_id": "{model}", "seq_id": "{seq}", "path": KEPT, "optimizer": False},
    ],
    "create_custom_loss": [{"session_id": "{session}", "name": "a", "graph": {"format": 1, "nodes": []}}],
    "create_sampling_session": [
        {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": "text"},
        {
            "session_id": "{session}",
            "sampling_session_seq_id": 10,
            "model_path": "tinker://{model}/sampler_weights/kept",
        },
    ],
    "join_sampling_session": [{"sampling_session_id": "{sampler}"}],
    "asample": [
        SAMPLE | {"num_samples": 2, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2},
        SAMPLE
        | {
            "sampling_params": {
                "max_tokens": 3,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 5,
                "seed": 1,
                "stop": ["a", "b"],
            }
        },
        SAMPLE
        | {
            "sampling_params": {"max_tokens": 3, "stop": [7, 8]},
            "prompt_alt_tokens_k": 2,
            "target_prompt_logprobs": TARGETS,
        },
        SAMPLE
        | {
            "prompt": SEEN,
            "sampling_session_id": "{eye_sampler}",
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 2,
        },
    ],
    "retrieve_future": [{"request_id": "{model}/0", "allow_metadata_only": True}, {"request_id": "{sampler}/1"}],
    "retrieve_futures": [
        {"target": {"sampling_session_id": "{sampler}", "cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0.0}
    ],
    "cancel_future": [{"request_id": "{sampler}/1"}],
    "weights_info": [{"tinker_path": KEPT}],
    "copy_weights": [
        {"source_path": KEPT, "destination_project_id": "p", "ttl_seconds": 3600},
        {"source_path": KEPT, "session_id": "{session}", "model_seq_id": 8},
    ],
    "external_weights_upload_start": [
        {"base_model": "text", "lora_config": {"rank": 4, "seed": 1}, "destination_project_id": "p"}
    ],
    "external_weights_upload_finish": [{"upload_id": "0" * 32}],
    "upload/{upload_id}/{file}": [{}],
    "training_runs/{run_id}/checkpoints/{segment}/{name}/ttl": [{"ttl_seconds": 3600}],
    "sessions/{session_id}/project": [{"project_id": "p"}],
    "sessions/search": [
        {"session_id": "{session}", "project_ids": ["p"], "user_metadata": {"a": "b"}, "display_name": "d", "limit": 5},
        {"owner": {"type": "own"}, "statuses": [{"type": "client_finished", "reasons": ["success"]}], "limit": 5},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "{session}"}},
    ],
    "checkpoints/search": [
        {"project_ids": ["p", ""], "user_metadata": {"a": "b"}, "checkpoint_type": "sampler", "limit": 5},
        {"base_models": ["text"], "owner": {"type": "own"}},
        {
            "cursor": {
                "last_created_at": "2026-01-01T00:00:00Z",
                "last_checkpoint_uuid": "tinker://{model}/weights/none",
            }
        },
    ],
}
"""Right bodies of every route that reads JSON."""

PARAMETERS: dict[str, list[str]] = {
    "session_id": ["{session}"],
    "run_id": ["{model}", "{eye}"],
    "segment": ["weights", "sampler_weights", "external_weights"],
    "name": ["a", "kept"],
    "file": ["adapter_model.safetensors", "../checkpoint.json"],
    "upload_id": ["0" * 32],
    "sampling_session_id": ["{sampler}", "{eye_sampler}"],
    "path": ["nothing", "api/v1/nothing"],
}
"""Right values of what stands in a path."""

WORK = [("POST", path) for path in ("forward_backward", "forward_backward", "optim_step", "asample")]
QUERIES = ["limit", "offset", "access_scope", "project_id", "expires", "signature", "event_type", "x"]
VALUES = ["1", "0", "-1", str(2**70), "owned", "accessible", "nan", "", "ü\0"]
MEDIA_TYPES = ["application/json; charset=utf-8", "application/x-protobuf", "text/plain", "multipart/form-data"]
JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True)
class Shot:
    """One request of the run."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    """JSON with placeholders, bytes, a protobuf message, or None."""
    media_type: str = JSON
    cut: tuple[int, int, bytes] | None = None
    """What to put in the place of which bytes of the encoded body."""
    compressed: bool = False

    def content(self, encoded: bytes) -> bytes:
        """The body as it goes over the wire, made of the encoded one."""
        if self.compressed:
            encoded = zstandard.compress(encoded, 1)
        if self.cut is None or not encoded:
            return encoded
        start = self.cut[0] % len(encoded)
        return encoded[:start] + self.cut[2] + encoded[start + self.cut[1] :]


def shot(random: Random, routes: list[tuple[str, str]]) -> Shot:
    """Any request to any of these routes, given as method and path below the API; every third one trains or samples."""
    method, route = random.choice(random.choice([routes, routes, WORK]))
    path = route
    for name, values in PARAMETERS.items():
        if f"{{{name}}}" in path:
            value = random.choice([*values, *values, quote(_garbage(random).decode("latin-1"), safe="")])
            path = path.replace(
                f"{{{name}}}", "{ending}" if route.endswith("finish") and value == "{session}" else value
            )
    if method in ("GET", "DELETE"):
        # The checkpoint that other requests load stays.
        query = {random.choice(QUERIES): random.choice(VALUES) for _ in range(random.randint(0, 2))}
        return Shot(method, path.replace("/kept", "/a") if method == "DELETE" else path, query)
    kind, compressed = random.randint(0, 11), random.random() < 0.5
    if kind == 0:
        body = random.choice([_garbage(random), copy.deepcopy(random.choice(NASTY))])
        return Shot(method, path, body=body, media_type=random.choice([JSON, *MEDIA_TYPES]), compressed=compressed)
    cut = (random.randint(0, 10**4), random.randint(0, 4), _garbage(random)[:4]) if kind == 1 else None
    if route == "forward_backward":
        return Shot(method, path, body=_training(random), media_type=PROTOBUF, cut=cut, compressed=compressed)
    return Shot(method, path, body=_spoiled(random, random.choice(BODIES.get(route, [{}]))), cut=cut)


def _garbage(random: Random) -> bytes:
    return random.randbytes(random.randint(0, 40))


def _spoiled(random: Random, right: Any) -> Any:
    """A right body with up to three things replaced, left out or added."""
    body = copy.deepcopy(right)
    for _ in range(random.randint(0, 3)):
        if not (places := list(_places(body))):
            break
        holder, key = random.choice(places)
        action = random.randint(0, 5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[random.choice(["", "x", "ü", "type"])] = copy.deepcopy(random.choice(NASTY))
        else:
            holder[key] = copy.deepcopy(random.choice(NASTY))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, item in items:
        yield value, key
        yield from _places(item)


INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "gspo": ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("target_tokens", "logprobs", "advantages"))
"""What each loss needs."""
NUMBERS = [0.0, -0.5, 3e38, 1e-40, float("nan"), float("inf"), -float("inf")]
NASTY_BY_TYPE: dict[type, list[Any]] = {
    int: [-1, 0, 1, 2, 3, 7, 2**31 - 1],
    float: NUMBERS,
    bool: [False, True],
    str: ["", "gif", "clip_low_threshold", "custom", "mask", "x" * 300],
    bytes: [b"", b"abc", png(0), png(0)[:200], png(0, 300, 1), b"\xff\xd8\xff"],
}


def _training(random: Random) -> pb.ForwardBackwardRequest:
    """A pass with up to two things changed in it. It names its model by a placeholder and has no seq_id yet."""
    model, loss_fn = random.choice(["{model}", "{eye}"]), random.choice(list(INPUTS))
    data = [_datum(random.randint(1, 9), loss_fn, model == "{eye}") for _ in range(random.randint(1, 3))]
    config = {"clip_low_threshold": pb.LossConfigValue(number=random.choice(NUMBERS))} if random.random() < 0.1 else {}
    forward_only = random.random() < 0.5
    message = pb.ForwardBackwardRequest(
        model_id=model, data=data, loss_fn=loss_fn, forward_only=forward_only, loss_fn_config_v2=config
    )
    for _ in range(random.randint(0, 2)):
        holder, name = random.choice([place for place in _fields(message) if place[1] != "model_id"])
        value = getattr(holder, name)
        if name == "loss_fn_inputs":
            key = random.choice(sorted(value))
            moved = value.pop(key) if random.random() < 0.5 else pb.Tensor(sparse_csr=_sparse(random), shape=[3, 2])
            value[random.choice([key, *NASTY_BY_TYPE[str]])].CopyFrom(moved)
        elif name == "shape":
            holder.shape[:] = random.choices([0, 1, 2, 9, -1, 2**40], k=random.randint(0, 3))
        elif type(value) is bytes and random.random() < 0.7:  # numbers that are wrong by their value
            numbers: Any = (
                random.choices(NASTY_BY_TYPE[int], k=9)
                if holder.DESCRIPTOR.name != "Tensor"
                else random.choices(NUMBERS, k=9)
            )
            setattr(
                holder, name, np.array(numbers, "<i4" if isinstance(numbers[0], int) else "<f4").tobytes()[: len(value)]
            )
        elif type(value) in NASTY_BY_TYPE:
            setattr(holder, name, random.choice(NASTY_BY_TYPE[type(value)]))
        else:
            holder.ClearField(name)
    return message


def _sparse(random: Random) -> pb.SparseCsr:
    return pb.SparseCsr(values=_garbage(random), crow_indices=_garbage(random), col_indices=_garbage(random))


def _fields(message: Any) -> Iterator[tuple[Any, str]]:
    """Every field that is set, with the message that holds it."""
    for descriptor, value in message.ListFields():
        yield message, descriptor.name
        values = (
            value.values()
            if hasattr(value, "values") and not hasattr(value, "ListFields")
            else value
            if hasattr(value, "add")
            else [value]
        )
        for inner in values:
            if hasattr(inner, "ListFields"):
                yield from _fields(inner)


def _datum(length: int, loss_fn: str, image: bool) -> pb.Datum:
    """A right datum of that many tokens, with an image among them or not."""
    chunks = [pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.arange(length, dtype="<i4").tobytes()))]
    if image and length % 2:
        chunks.append(pb.Chunk(image=pb.ImageChunk(data=png(length), format="png", expected_tokens=6)))
        length += 6
    tensors = {name: tensor([0.5] * length) for name in INPUTS[loss_fn]}
    return pb.Datum(model_input=chunks, loss_fn_inputs=tensors | {"target_tokens": tensor(range(length))})


def encode(body: Any) -> bytes:
    """A filled-in body as bytes."""
    if body is None or isinstance(body, bytes):
        return body or b""
    return body.SerializeToString() if isinstance(body, pb.ForwardBackwardRequest) else json.dumps(body).encode()
