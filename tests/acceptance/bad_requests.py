"""Bad JSON, names, ids and bodies: a table of requests that are refused, each with the words of its refusal.

What belongs to a model's sequence fails through its future, everything else is refused at once.
"""

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import zstandard

from tests.acceptance.bad_target import Case, Target, detail_of, refused
from tests.acceptance.bad_training import INF, NAN, PROTOBUF, png_that_claims
from tests.bases import png

HUGE = 2**70
ALL_BASES = ["base_model 'gpt-9' is not served here", "text, vision"]


def post(path: str, /, status: int = 400, method: str = "POST", **body: Any) -> Callable[[Target], str]:
    """A JSON body that is refused at once."""
    return refused(path, status, json.dumps(body), method=method)


def get(path: str, status: int = 400) -> Callable[[Target], str]:
    """A GET that is refused."""
    return refused(path, status, b"", method="GET")


def operation(kind: str, **body: Any) -> Callable[[Target], str]:
    """An operation of the model that fails through its future."""

    def send(target: Target) -> str:
        whole = {"model_id": target.model.model_id, "seq_id": target.next()} | body
        reply = target.http.post(kind, content=json.dumps(whole), headers={"Content-Type": "application/json"})
        assert reply.status_code == 200, reply.text
        return target.failure(reply.json()["request_id"])

    return send


def sample(*chunks: dict[str, Any], status: int = 400, params: dict[str, Any] | None = None, **fields: Any) -> Callable[[Target], str]:
    """A sample of three tokens, if not of these chunks. `status` 200 means that it fails through its future."""
    prompt = {"chunks": chunks or [words(5, 6, 7)]}

    def send(target: Target) -> str:
        body = {"sampling_session_id": target.sampler, "seq_id": target.next_sample(), "prompt": prompt}
        whole = json.dumps(body | {"sampling_params": {"max_tokens": 2} | (params or {})} | fields)
        reply = target.http.post("asample", content=whole, headers={"Content-Type": "application/json"})
        assert reply.status_code == status, reply.text
        return detail_of(reply) if status != 200 else target.failure(reply.json()["request_id"])

    return send


def words(*tokens: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": tokens}


def photo(data: bytes, format: str = "png", **fields: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": format, **fields}


def csr_targets(crow: list[int], col: list[int], values: list[int], shape: tuple[int, int] = (2, 3)) -> dict[str, Any]:
    """Ids to score, as a sparse matrix."""
    return {"data": values, "dtype": "int64", "shape": shape, "sparse_crow_indices": crow, "sparse_col_indices": col}


PROMPTS = [
    Case("no prompt", sample(prompt={}), ["prompt.chunks: Field required"]),
    Case("prompt without chunks", sample(prompt={"chunks": []}), ["the prompt is empty; send at least one token"]),
    Case("prompt without tokens", sample(words()), ["the prompt is empty; send at least one token"]),
    Case("prompt token below 0", sample(words(1), words(5, -1)), ["prompt.chunks.1.tokens at position 1 is -1", "[0, 2**31)"]),
    Case("prompt token too large", sample(words(5, 2048)), ["prompt.chunks.0.tokens at position 1 is 2048", "ends at 2047"]),
    Case("prompt token of 70 bits", sample(words(HUGE)), ["prompt.chunks.0.tokens", "more than 64 bits"]),
    Case("prompt token no number", sample(prompt={"chunks": [{"type": "encoded_text", "tokens": [1, "a"]}]}), ["tokens.1", "'a'"]),
    Case("audio prompt", sample({"type": "dmel", "dmel": "AAAA"}), ["prompt.chunks.0: type='dmel'", "send encoded_text and image"]),
    Case("picture elsewhere", sample({"type": "image_asset_pointer", "location": "s3://a/b", "format": "png"}), ["send encoded_text and"]),
    Case("chunk of no type", sample({"tokens": [1]}), ["prompt.chunks.0", "'type'"]),
    Case("prompt longer than the context", sample(words(*[1] * 32769)), ["context window of text: 32769 + 2 > 32768"]),
    Case("answer beyond the context", sample(params={"max_tokens": 32766}), ["context window of text: 3 + 32766 > 32768"]),
    Case("sampled picture for a text model", sample(photo(png(0))), ["prompt.chunks.0 is an image, but text takes text only"]),
    *(
        Case(f"sampled {name}", sample(words(1), chunk, status=status), ["chunks.1" if status == 400 else "chunk 1", *says], "vision")
        for name, status, chunk, says in (
            ("picture that is none", 400, photo(b"no picture"), ["10 bytes labelled 'png'", "not a PNG or JPEG"]),
            ("picture in bad base64", 400, {"type": "image", "data": "@@@@", "format": "png"}, ["data is not base64"]),
            ("truncated picture", 200, photo(png(0)[:300]), ["png image of 96 x 64 pixels is broken"]),
            ("wrong label", 400, photo(png(0), "jpeg"), ["labelled 'jpeg' but is 'png'"]),
            ("unknown format", 400, photo(png(0), "gif"), ["format", "'png' or 'jpeg'", "got 'gif'"]),
            ("picture of too many bytes", 400, photo(png(0) + bytes(20 * 2**20)), ["max_image_mib allows 20"]),
            (
                "picture of too many pixels",
                400,
                photo(png_that_claims(30000, 30000)),
                ["30000 x 30000", "max_image_pixels"],
            ),
            ("long and narrow picture", 400, photo(png(0, 1000, 1)), ["1000 x 1 pixels", "max_aspect=200"]),
            ("other count", 200, photo(png(0), expected_tokens=7), ["expected_tokens is 7", "takes 6 tokens in vision"]),
        )
    ),
]

SAMPLING = [
    *(
        Case(f"num_samples={number}", sample(num_samples=number), [f"num_samples: Input should be {limit}, got {number}"])
        for number, limit in ((0, "greater than or equal to 1"), (-1, "greater than or equal to 1"), (HUGE, "less than or equal to 1024"))
    ),
    *(
        Case(f"{name}={value}", sample(params={name: value}), [f"sampling_params.{name}: ", limit])
        for name, value, limit in (
            ("max_tokens", 0, "greater than or equal to 1, got 0"),
            ("temperature", -0.5, "greater than or equal to 0, got -0.5"),
            ("temperature", NAN, "finite number, got nan"),
            ("temperature", INF, "finite number, got inf"),
            ("top_p", 0, "greater than 0, got 0"),
            ("top_p", 1.5, "less than or equal to 1, got 1.5"),
            ("top_k", 0, "-1 (all tokens) or at least 1, got 0"),
            ("top_k", -2, "greater than or equal to -1, got -2"),
            ("seed", -1, "greater than or equal to 0, got -1"),
            ("seed", HUGE, f"got {HUGE}"),
            ("stop", "", "no text may be empty, got ''"),
            ("stop", [1, "a"], "a list of texts, or a list of token ids"),
            ("stop", [-1], "token ids in [0, 2**31)"),
            ("min_p", 0.1, "Extra inputs are not permitted"),
        )
    ),
    Case("topk too large", sample(topk_prompt_logprobs=1025, prompt_logprobs=True), ["topk_prompt_logprobs", "equal to 1024, got 1025"]),
    Case("last_n beyond the prompt", sample(prompt_logprobs=True, prompt_logprobs_last_n=3), ["last_n is 3", "between 1 and 2"]),
    Case("unknown field of a sample", sample(beam_width=4), ["beam_width: Extra inputs are not permitted, got 4"]),
    Case("sample without session", sample(sampling_session_id=None), ["sampling_session_id and seq_id are both needed"]),
    Case("sample of an unknown session", sample(sampling_session_id="a:sample:0", status=404), ["'a:sample:0' does not exist"]),
    Case("sample number of 70 bits", sample(seq_id=HUGE), [f"seq_id: Input should be less than or equal to {2**63 - 1}, got {HUGE}"]),
    *(
        Case(f"sampled {name}", sample(target_prompt_logprobs=targets), ["target_prompt_logprobs", *says])
        for name, targets, says in (
            ("CSR column", csr_targets([0, 1, 1], [3], [7]), ["col_indices at position 0 is 3", "[0, 3)"]),
            ("CSR rows", csr_targets([0, 1], [0], [7]), ["crow_indices has 2 entries; 2 rows need 3"]),
            ("CSR rows that fall", csr_targets([0, 2, 1], [0], [7]), ["crow_indices must rise from 0"]),
            ("CSR target", csr_targets([0, 1, 1], [1], [2048]), ["holds 2048 in row 0", "ids below 2048"]),
            ("rows of targets", csr_targets([0, 1, 1, 1], [0], [7], (3, 3)), ["has 3 rows; a prompt of 3 tokens needs 2"]),
            ("CSR index of 70 bits", csr_targets([0, 1, HUGE], [0], [7]), ["sparse_crow_indices", "more than 64 bits"]),
        )
    ),
]

STEPS = [
    *(
        Case(f"{name}={value}", operation("optim_step", adam_params={name: value}), [f"adam_params.{name}: ", f"got {value!r}"])
        for name, value in (
            ("learning_rate", NAN),
            ("learning_rate", INF),
            ("learning_rate", -0.1),
            ("learning_rate", "0.1"),
            ("beta1", 1.0),
            ("beta2", -0.1),
            ("eps", NAN),
            ("weight_decay", -1.0),
            ("grad_clip_norm", NAN),
            ("momentum", 0.9),
        )
    ),
    Case("no hyper-parameters", operation("optim_step"), ["adam_params: Field required"]),
    Case("other optimizer", operation("optim_step", optimizer_params={"type": "dimuon"}), ["optimizer_params", "send adam_params"]),
    Case("step of an unknown model", post("optim_step", 404, model_id="a:train:0", seq_id=1, adam_params={}), ["'a:train:0' does"]),
    *(
        Case(f"seq_id={seq_id}", post("optim_step", model_id="{model}", seq_id=seq_id, adam_params={}), ["seq_id: ", f"got {seq_id!r}"])
        for seq_id in (0, -1, HUGE, "1")
    ),
]

NAMES = [
    *(
        Case(f"{kind} as {name!r}", operation(kind, path=name), ["path", "cannot name a checkpoint; use"])
        for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external")
        for name in ("a/b", "..", "a\0b", "a\nb", "", "../../etc/passwd", "x" * 201)
    ),
    Case("name of a number", operation("save_weights", path=7), ["path: Input should be a valid string, got 7"]),
    Case("short life", operation("save_weights", path="a", ttl_seconds=1), ["ttl_seconds", "equal to 3600, got 1"]),
    *(
        Case(
            f"loading {path!r}",
            post("load_weights", status, session_id="{session}", model_seq_id=7, path=path, optimizer=True),
            ["path=", *says],
        )
        for path, status, says in (
            ("tinker://{model}/weights/..", 400, ["cannot name a checkpoint", "not '.' or '..'"]),
            ("tinker://../../etc/weights/passwd", 400, ["is not tinker://MODEL_ID/SEGMENT/NAME"]),
            ("file:///etc/passwd", 400, ["is not tinker://MODEL_ID/SEGMENT/NAME"]),
            ("tinker://{model}/weights/a\0b", 400, ["printable characters"]),
        )
    ),
    Case("loading what is not there", post("weights_info", 404, tinker_path="tinker://{model}/weights/none"), ["none", "does not exist"]),
    Case("name in a URL", post("training_runs/{model}/checkpoints/weights/%2e%2e/ttl", method="PUT"), ["cannot name a checkpoint"]),
    Case("newline in a URL", get("training_runs/{model}/checkpoints/weights/a%0Ab/external_weights_urls"), ["printable characters"]),
]

NEW_MODEL: dict[str, Any] = {"session_id": "{session}", "model_seq_id": 9}
NEW_SAMPLER: dict[str, Any] = {"session_id": "{session}", "sampling_session_seq_id": 9}

MODELS = [
    *(
        Case(f"model: {name}", post("create_model", status, **NEW_MODEL | body), says)
        for name, status, body, says in (
            ("unknown base", 404, {"base_model": "gpt-9"}, ALL_BASES),
            ("unknown session", 404, {"session_id": "none", "base_model": "text"}, ["session 'none' does not exist"]),
            ("rank below 0", 400, {"base_model": "text", "lora_config": {"rank": -1}}, ["lora_config.rank", "got -1"]),
            ("huge rank", 400, {"base_model": "text", "lora_config": {"rank": HUGE}}, [f"rank={HUGE}", "max_lora_rank is 256"]),
            ("huge seed", 400, {"base_model": "text", "lora_config": {"rank": 8, "seed": HUGE}}, ["lora_config.seed", f"got {HUGE}"]),
            ("unknown setting", 400, {"base_model": "text", "lora_config": {"rank": 8, "alpha": 1}}, ["lora_config.alpha", "got 1"]),
            ("other optimizer", 400, {"base_model": "text", "optimizer_config": {"type": "dimuon"}}, ["'dimuon'", "use 'adamw'"]),
            ("number below 0", 400, {"base_model": "text", "model_seq_id": -1}, ["model_seq_id", "got -1"]),
            ("number of 70 bits", 400, {"base_model": "text", "model_seq_id": HUGE}, ["model_seq_id", f"got {HUGE}"]),
        )
    ),
    *(
        Case(
            f"sampler: {name}",
            post("create_sampling_session", status, **NEW_SAMPLER | body),
            says,
        )
        for name, status, body, says in (
            ("unknown base", 404, {"base_model": "gpt-9"}, ALL_BASES),
            ("no weights", 400, {}, ["base_model or model_path is needed"]),
            ("impossible path", 400, {"model_path": "tinker://../sampler_weights"}, ["is not tinker://MODEL_ID/SEGMENT/NAME"]),
            ("absent path", 404, {"model_path": "tinker://{model}/sampler_weights/none"}, ["none", "does not exist"]),
            ("number of 70 bits", 400, {"base_model": "text", "sampling_session_seq_id": HUGE}, [f"got {HUGE}"]),
        )
    ),
    Case("no upload of losses", post("create_custom_loss"), ["pass the function itself to forward_backward_custom"]),
]

FUTURES = [
    *(
        Case(f"request_id={shown}", post("retrieve_future", 404, request_id=request_id), [shown, "does not exist"])
        for request_id, shown in (
            ("none", "'none'"),
            ("", "''"),
            (f"{{model}}/{HUGE}", f"/{HUGE}'"),
            (f"{{sampler}}/{HUGE}", f"/{HUGE}'"),
            ("a:sample:0/1", "'a:sample:0'"),
            ("a\0b\n", r"'a\x00b\n'"),
            ("../../etc/passwd", "'../../etc/passwd'"),
        )
    ),
    Case("request_id is a number", post("retrieve_future", request_id=HUGE), [f"request_id: Input should be a valid string, got {HUGE}"]),
    Case("request_id never sent", post("retrieve_future", 404, request_id="{model}/2147483647"), ["/2147483647' does not exist"]),
    Case("lost sample", post("retrieve_future", 410, request_id="{sampler}/999"), ["/999 is not known any more", "send it again"]),
    Case("heartbeat of nobody", post("session_heartbeat", 410, session_id="none"), ["session 'none' is finished or does not exist"]),
    Case("finish of nobody", post("sessions/none/finish", 404, reason={"type": "success"}), ["session 'none' does not exist"]),
    Case("page below 0", get("training_runs?offset=-1"), ["offset", "got '-1'"]),
    Case("page too long", get(f"checkpoints?limit={HUGE}"), ["limit", "less than or equal to 1000"]),
    Case("unknown run", get("training_runs/none", 404), ["training run 'none' does not exist"]),
    Case("unknown address", get("nothing/here", 404), ["GET /api/v1/nothing/here is not built"]),
]


ZSTD = {"Content_Encoding": "zstd"}


def bomb(states_its_size: bool, mebibytes: int = 300) -> bytes:
    """Zeros, compressed by about 30,000 to 1."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=states_its_size)
    return compressor.compress(bytes(mebibytes * 2**20))


BODIES = [
    Case(
        "body over the limit",
        refused("forward_backward", 413, lambda: bytes(257 * 2**20), PROTOBUF),
        ["larger than 268435456 bytes", "send smaller requests"],
    ),
    Case("small body over its limit", refused("telemetry", 413, lambda: bytes(9 * 2**20)), ["larger than 8388608 bytes"]),
    Case("bomb that states its size", refused("forward_backward", 413, partial(bomb, True), PROTOBUF, **ZSTD), ["268435456 bytes"]),
    Case("bomb that hides its size", refused("forward_backward", 413, partial(bomb, False), PROTOBUF, **ZSTD), ["268435456 bytes"]),
    Case("no zstd", refused("forward_backward", 400, b"abc", PROTOBUF, **ZSTD), ["not valid zstd"]),
    Case("cut zstd", refused("forward_backward", 400, bomb(True, 1)[:-5], PROTOBUF, **ZSTD), ["middle of a frame"]),
    Case("gzip", refused("forward_backward", 400, b"abc", PROTOBUF, Content_Encoding="gzip"), ["Content-Encoding 'gzip'", "send zstd"]),
    Case("JSON for protobuf", refused("forward_backward", 400, b"{}"), ["Content-Type 'application/json'", "send application/x-protobuf"]),
    Case("protobuf for JSON", refused("asample", 400, b"", PROTOBUF), ["'application/x-protobuf'", "send application/json"]),
    Case("form", refused("create_session", 400, b"a=1", "application/x-www-form-urlencoded"), ["send application/json"]),
    Case("deep JSON", refused("create_session", 400, '{"user_metadata":' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}"), ["recursion limit"]),
    Case("deep lists", refused("asample", 400, "[" * 10**5 + "]" * 10**5), ["recursion limit"]),
    Case("no JSON", refused("create_model", 400, b"\xff{"), ["body: Invalid JSON"]),
    Case("half a surrogate", refused("create_session", 400, rb'{"display_name": "\ud800"}'), ["body: Invalid JSON"]),
    Case("empty body", refused("create_model", 400, b""), ["body: Invalid JSON: EOF"]),
    Case("list for an object", refused("create_sampling_session", 400, b"[]"), ["body: Input should be an object, got []"]),
    Case(
        "long id",
        post("create_model", 404, session_id="x" * 10**6, model_seq_id=0, base_model="text"),
        ["characters left out"],
    ),
]

REQUESTS = [*PROMPTS, *SAMPLING, *STEPS, *NAMES, *MODELS, *FUTURES, *BODIES]
