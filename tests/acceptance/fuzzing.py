"""Requests of every kind, for the fuzz run: right ones, right ones with something wrong in them, and garbage.

A body names what it is about by a placeholder, `{model}` or `{seq}`, which is filled in when it is sent.
"""

import base64
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import zstandard
from hypothesis import strategies as st

from tests.acceptance.bad_training import tensor
from tests.bases import png
from tinsmith.wire import tinker_pb2 as pb

PLACEHOLDERS = ("{session}", "{ending}", "{model}", "{eye}", "{sampler}", "{eye_sampler}", "tinker://{model}/weights/kept")
NASTY = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 1, 3, 0.5, -0.5, 2**31, 2**63, 2**64, 2**70, -(2**70), 1e308, float("nan"), float("inf"), "", "\0"]
    ),
    st.sampled_from(["..", "a/b", "a\nb", "\ud800", "x" * 300, "ü", "text", "vision", "tinker://a/b/c", [], {}, [[]], {"a": None}]),
    st.sampled_from(PLACEHOLDERS),
    st.text(max_size=8),
    st.lists(st.integers(-3, 3), max_size=4),
)
TEXT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}
PICTURE = {"type": "image", "data": base64.b64encode(png(0)).decode(), "format": "png", "expected_tokens": 6}
SAMPLE = {"sampling_session_id": "{sampler}", "seq_id": "{sample}", "prompt": TEXT, "sampling_params": {"max_tokens": 3}}
STEP = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
KEPT = "tinker://{model}/weights/kept"
TARGETS = {"data": [5, 6, 7], "dtype": "int64", "shape": [3, 2], "sparse_crow_indices": [0, 1, 2, 3], "sparse_col_indices": [0, 1, 0]}

BODIES: dict[str, list[dict[str, Any]]] = {
    "client/config": [{"sdk_version": "0.38.0"}],
    "client/dynamic_config": [{"sdk_version": "0.38.0"}],
    "telemetry": [{"events": [], "platform": "x", "session_id": "{session}"}],
    "create_session": [{"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "project_id": "p", "display_name": "d"}],
    "session_heartbeat": [{"session_id": "{session}", "type": "session_heartbeat"}],
    "sessions/{session_id}/finish": [{"reason": {"type": "success"}, "detail": None}],
    "create_model": [
        {"session_id": "{session}", "model_seq_id": 5, "base_model": "text", "lora_config": {"rank": 4, "seed": 1, "train_mlp": True}},
        {
            "session_id": "{session}",
            "model_seq_id": 6,
            "base_model": "text",
            "user_metadata": {"a": 1},
            "optimizer_config": {"type": "adamw"},
        },
    ],
    "get_info": [{"model_id": "{model}", "type": "get_info"}],
    "optim_step": [
        {"model_id": model, "seq_id": seq, "adam_params": STEP} for model, seq in (("{model}", "{seq}"), ("{eye}", "{eye_seq}"))
    ],
    "save_weights": [{"model_id": "{model}", "seq_id": "{seq}", "path": "a", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {}}],
    "save_weights_for_sampler": [
        {"model_id": "{model}", "seq_id": "{seq}", "path": "a", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
        {"model_id": "{model}", "seq_id": "{seq}", "sampling_session_seq_id": 3, "kind": "snapshot"},
        {"model_id": "{model}", "seq_id": "{seq}", "sampling_session_seq_id": 4, "kind": "inflight"},
    ],
    "save_weights_external": [
        {"model_id": "{model}", "seq_id": "{seq}", "path": "a", "ttl_seconds": 3600, "age_encryption_recipients": ["a"]}
    ],
    "load_weights": [
        {"session_id": "{session}", "model_seq_id": 7, "path": KEPT, "optimizer": True, "base_model": "text", "user_metadata": {"a": 1}},
        {"model_id": "{model}", "seq_id": "{seq}", "path": KEPT, "optimizer": False},
    ],
    "create_custom_loss": [{"session_id": "{session}", "name": "a", "graph": {"format": 1, "nodes": []}}],
    "create_sampling_session": [
        {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": "text"},
        {"session_id": "{session}", "sampling_session_seq_id": 10, "model_path": "tinker://{model}/sampler_weights/kept"},
    ],
    "join_sampling_session": [{"sampling_session_id": "{sampler}"}],
    "asample": [
        SAMPLE | {"num_samples": 2, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2},
        SAMPLE | {"sampling_params": {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ["a", "b"]}},
        SAMPLE | {"sampling_params": {"max_tokens": 3, "stop": [7, 8]}, "prompt_alt_tokens_k": 2, "target_prompt_logprobs": TARGETS},
        SAMPLE
        | {
            "prompt": {"chunks": [*TEXT["chunks"], PICTURE]},
            "sampling_session_id": "{eye_sampler}",
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 2,
        },
    ],
    "retrieve_future": [{"request_id": "{model}/0", "allow_metadata_only": True}, {"request_id": "{sampler}/1"}],
    "retrieve_futures": [{"target": {"sampling_session_id": "{sampler}", "cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0.0}],
    "cancel_future": [{"request_id": "{sampler}/1"}],
    "weights_info": [{"tinker_path": KEPT}],
    "copy_weights": [
        {"source_path": KEPT, "destination_project_id": "p", "ttl_seconds": 3600},
        {"source_path": KEPT, "session_id": "{session}", "model_seq_id": 8},
    ],
    "training_runs/{run_id}/checkpoints/{segment}/{name}/ttl": [{"ttl_seconds": 3600}],
    "sessions/{session_id}/project": [{"project_id": "p"}],
    "sessions/search": [
        {"session_id": "{session}", "project_ids": ["p"], "user_metadata": {"a": "b"}, "display_name": "d", "limit": 5},
        {"owner": {"type": "own"}, "statuses": [{"type": "client_finished", "reasons": ["success"]}], "limit": 5},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "{session}"}},
    ],
}
"""Right bodies of every route that reads JSON."""

WORK = [("POST", path) for path in ("forward_backward", "forward_backward", "optim_step", "asample")]

PARAMETERS: dict[str, list[str]] = {
    "session_id": ["{session}"],
    "run_id": ["{model}", "{eye}"],
    "segment": ["weights", "sampler_weights", "external_weights"],
    "name": ["a", "kept"],
    "file": ["adapter_model.safetensors", "../checkpoint.json"],
    "sampling_session_id": ["{sampler}", "{eye_sampler}"],
    "path": ["nothing", "api/v1/nothing"],
}
"""Right values of what stands in a path."""

QUERY = st.dictionaries(
    st.sampled_from(["limit", "offset", "access_scope", "project_id", "expires", "signature", "event_type", "x"]),
    st.one_of(st.sampled_from(["1", "0", "-1", str(2**70), "owned", "accessible", "nan", ""]), st.text(max_size=5)),
    max_size=2,
)


@dataclass(frozen=True)
class Shot:
    """One request of the run."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    """JSON with placeholders, bytes, a protobuf message, or None."""
    media_type: str = "application/json"
    cut: tuple[int, int, bytes] | None = None
    """What to put in the place of which bytes of the encoded body."""
    compressed: bool = False

    def content(self, encoded: bytes) -> bytes:
        """The body as it goes over the wire, made of the encoded one."""
        if self.compressed:
            encoded = zstandard.ZstdCompressor(level=1).compress(encoded)
        if self.cut is None or not encoded:
            return encoded
        start = self.cut[0] % len(encoded)
        return encoded[:start] + self.cut[2] + encoded[start + self.cut[1] :]


def shots(routes: list[tuple[str, str]]) -> st.SearchStrategy[Shot]:
    """Any request to any of these routes, given as method and path below the API; every third one trains or samples."""
    any_route = st.sampled_from(routes)
    return st.one_of(any_route, any_route, st.sampled_from(WORK)).flatmap(lambda route: _shot(*route))


@st.composite
def _shot(draw: st.DrawFn, method: str, route: str) -> Shot:
    path = route
    for name, values in PARAMETERS.items():
        if f"{{{name}}}" in path:
            value = draw(st.one_of(st.sampled_from(values), st.sampled_from(values), st.text(max_size=6).map(_quoted)))
            path = path.replace(f"{{{name}}}", "{ending}" if route.endswith("finish") and value == "{session}" else value)
    if method in ("GET", "DELETE"):
        # The checkpoint that other requests load stays.
        return Shot(method, path.replace("/kept", "/a") if method == "DELETE" else path, draw(QUERY))
    kind = draw(st.integers(0, 11))
    if kind == 0:
        return Shot(
            method, path, body=draw(st.one_of(st.binary(max_size=40), NASTY)), media_type=draw(MEDIA_TYPES), compressed=draw(st.booleans())
        )
    cut = draw(CUTS) if kind == 1 else None
    if route == "forward_backward":
        return Shot(method, path, body=draw(passes()), media_type="application/x-protobuf", cut=cut, compressed=draw(st.booleans()))
    right = draw(st.sampled_from(BODIES[route])) if route in BODIES else {}
    return Shot(method, path, body=draw(mutations(right)), cut=cut)


MEDIA_TYPES = st.sampled_from(
    ["application/json", "application/json; charset=utf-8", "application/x-protobuf", "text/plain", "multipart/form-data"]
)
CUTS = st.tuples(st.integers(0, 10**4), st.integers(0, 4), st.binary(max_size=4))


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="replace")


@st.composite
def mutations(draw: st.DrawFn, right: Any) -> Any:
    """A right body with up to three things replaced, left out or added."""
    body = copy.deepcopy(right)
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(body))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        action = draw(st.integers(0, 5))
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[draw(st.text(max_size=4))] = copy.deepcopy(draw(NASTY))
        else:
            holder[key] = copy.deepcopy(draw(NASTY))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items:
        yield value, key
        yield from _places(item)


INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "gspo": ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("target_tokens", "logprobs", "advantages"))
"""What each loss needs."""
INTEGERS = st.sampled_from([-1, 0, 1, 2, 7, 2**31 - 1])
NASTY_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": INTEGERS,
    "float": st.sampled_from([0.0, -0.5, 3e38, 1e-40, float("nan"), float("inf"), -float("inf")]),
    "bool": st.booleans(),
    "str": st.one_of(st.sampled_from(["", "gif", "clip_low_threshold", "custom", "x" * 300]), st.text(max_size=5)),
    "bytes": st.one_of(
        st.binary(max_size=24),
        st.lists(st.sampled_from([1, -1, 2048, 2**31 - 1]), max_size=70).map(lambda ids: np.array(ids, "<i4").tobytes()),
        st.lists(st.sampled_from([1.0, np.nan, np.inf, -3e38]), min_size=1, max_size=9).map(
            lambda numbers: np.array(numbers, "<f4").tobytes()
        ),
        st.sampled_from([png(0), png(0)[:200], png(0, 300, 1), b"\xff\xd8\xff"]),
    ),
}


@st.composite
def passes(draw: st.DrawFn) -> pb.ForwardBackwardRequest:
    """A pass with up to two things changed in it. It names its model by a placeholder and has no seq_id yet."""
    model, loss_fn = draw(st.sampled_from(["{model}", "{eye}"])), draw(st.sampled_from(list(INPUTS)))
    data = [_datum(length, loss_fn, model == "{eye}") for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))]
    message = pb.ForwardBackwardRequest(model_id=model, data=data, loss_fn=loss_fn, forward_only=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        holder, name = draw(st.sampled_from([place for place in _message_places(message) if place[1] != "model_id"]))
        value = getattr(holder, name)
        kind = type(value).__name__
        if kind in NASTY_BY_TYPE and name != "dtype":
            setattr(holder, name, draw(NASTY_BY_TYPE[kind]))
        elif name == "shape":
            holder.shape[:] = draw(st.lists(st.sampled_from([0, 1, 2, 9, -1, 2**40]), max_size=3))
        elif name == "loss_fn_inputs" and (key := draw(st.sampled_from(sorted(value)))) and draw(st.booleans()):
            value[draw(NASTY_BY_TYPE["str"])].CopyFrom(value.pop(key))
        elif name == "loss_fn_inputs":
            indices = {part: draw(st.binary(max_size=24)) for part in ("values", "crow_indices", "col_indices")}
            value[key].sparse_csr.CopyFrom(pb.SparseCsr(**indices))
        else:
            holder.ClearField(name)
    return message


def _message_places(message: Any) -> Iterator[tuple[Any, str]]:
    """Every field that is set, with the message that holds it."""
    for field_of, value in message.ListFields():
        yield message, field_of.name
        inner = (
            value.values() if hasattr(value, "values") and not hasattr(value, "ListFields") else value if hasattr(value, "add") else [value]
        )
        for each in inner:
            if hasattr(each, "ListFields"):
                yield from _message_places(each)


def _datum(length: int, loss_fn: str, picture: bool) -> pb.Datum:
    """A right datum of that many tokens, with a picture among them or not."""
    chunks = [pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.arange(length, dtype="<i4").tobytes()))]
    if picture and length % 2:
        chunks.append(pb.Chunk(image=pb.ImageChunk(data=png(length), format="png", expected_tokens=6)))
        length += 6
    tensors = {name: tensor([0.5] * length) for name in INPUTS[loss_fn]}
    return pb.Datum(model_input=chunks, loss_fn_inputs=tensors | {"target_tokens": tensor(range(length))})


def encode(body: Any) -> bytes:
    """A filled-in body as bytes."""
    if body is None or isinstance(body, bytes):
        return body or b""
    return body.SerializeToString() if isinstance(body, pb.ForwardBackwardRequest) else json.dumps(body).encode()
