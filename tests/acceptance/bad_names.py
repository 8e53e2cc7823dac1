"""Bad names, ids and bodies: a table of requests that are refused, each with the words of its refusal."""

from collections.abc import Callable
from typing import Any

from tests.acceptance.bad_requests import HUGE, operation, post
from tests.acceptance.bad_target import Case, Target, refused
from tests.acceptance.bad_training import PROTOBUF

ALL_BASES = "base_model 'gpt-9' is not served here ... text, vision"


def get(path: str, status: int = 400) -> Callable[[Target], str]:
    """A GET that is refused."""
    return refused(path, status, b"", method="GET")


NAMES = [
    *(
        Case(f"{kind} as {name!r}", operation(kind, path=name), "path ... cannot name a checkpoint; use")
        for kind, names in (
            ("save_weights", ("a/b", "..", "a\0b", "a\nb", "", "x" * 201)),
            ("save_weights_for_sampler", ("../../etc/passwd",)),
            ("save_weights_external", ("a/b",)),
        )
        for name in names
    ),
    *(
        Case(
            f"loading {path!r}",
            post("load_weights", session_id="{session}", model_seq_id=7, path=path, optimizer=True),
            f"path= ... {says}",
        )
        for path, says in (
            ("tinker://{model}/weights/..", "cannot name a checkpoint ... not '.' or '..'"),
            ("tinker://../../etc/weights/passwd", "is not tinker://MODEL_ID/SEGMENT/NAME"),
            ("file:///etc/passwd", "is not tinker://MODEL_ID/SEGMENT/NAME"),
            ("tinker://{model}/weights/a\0b", "printable characters"),
        )
    ),
    Case(
        "loading what is not there",
        post("weights_info", 404, tinker_path="tinker://{model}/weights/none"),
        "none ... does not exist",
    ),
    Case(
        "name in a URL",
        post("training_runs/{model}/checkpoints/weights/%2e%2e/ttl", method="PUT"),
        "cannot name a checkpoint",
    ),
    Case(
        "newline in a URL",
        get("training_runs/{model}/checkpoints/weights/a%0Ab/external_weights_urls"),
        "printable characters",
    ),
]

NEW_MODEL: dict[str, Any] = {"session_id": "{session}", "model_seq_id": 9}
NEW_SAMPLER: dict[str, Any] = {"session_id": "{session}", "sampling_session_seq_id": 9}

MODELS = [
    *(
        Case(f"model: {name}", post("create_model", status, **NEW_MODEL | body), says)
        for name, status, body, says in (
            ("unknown base", 404, {"base_model": "gpt-9"}, ALL_BASES),
            ("unknown session", 404, {"session_id": "none", "base_model": "text"}, "session 'none' does not exist"),
            ("rank below 0", 400, {"base_model": "text", "lora_config": {"rank": -1}}, "lora_config.rank ... got -1"),
            (
                "huge rank",
                400,
                {"base_model": "text", "lora_config": {"rank": HUGE}},
                f"rank={HUGE} ... up to 256 ... --max-lora-rank",
            ),
            (
                "huge seed",
                400,
                {"base_model": "text", "lora_config": {"rank": 8, "seed": HUGE}},
                f"lora_config.seed ... got {HUGE}",
            ),
            (
                "other optimizer",
                400,
                {"base_model": "text", "optimizer_config": {"type": "dimuon"}},
                "'dimuon' ... use 'adamw'",
            ),
            ("number of 70 bits", 400, {"base_model": "text", "model_seq_id": HUGE}, f"model_seq_id ... got {HUGE}"),
        )
    ),
    *(
        Case(f"sampler: {name}", post("create_sampling_session", status, **NEW_SAMPLER | body), says)
        for name, status, body, says in (
            ("unknown base", 404, {"base_model": "gpt-9"}, ALL_BASES),
            ("no weights", 400, {}, "base_model or model_path is needed"),
            (
                "impossible path",
                400,
                {"model_path": "tinker://../sampler_weights"},
                "is not tinker://MODEL_ID/SEGMENT/NAME",
            ),
            ("absent path", 404, {"model_path": "tinker://{model}/sampler_weights/none"}, "none ... does not exist"),
            ("number of 70 bits", 400, {"base_model": "text", "sampling_session_seq_id": HUGE}, f"got {HUGE}"),
        )
    ),
    Case("no upload of losses", post("create_custom_loss"), "pass the function itself to forward_backward_custom"),
]

FUTURES = [
    *(
        Case(f"request_id={shown}", post("retrieve_future", 404, request_id=request_id), f"{shown} ... does not exist")
        for request_id, shown in (
            ("none", "'none'"),
            ("", "''"),
            (f"{{model}}/{HUGE}", f"/{HUGE}'"),
            (f"{{sampler}}/{HUGE}", f"/{HUGE}'"),
            ("a\0b\n", r"'a\x00b\n'"),
        )
    ),
    Case(
        "request_id never sent",
        post("retrieve_future", 404, request_id="{model}/2147483647"),
        "/2147483647' does not exist",
    ),
    Case(
        "lost sample",
        post("retrieve_future", 410, request_id="{sampler}/999"),
        "/999 is not known any more ... send it again",
    ),
    Case(
        "heartbeat of nobody",
        post("session_heartbeat", 410, session_id="none"),
        "session 'none' is finished or does not exist",
    ),
    Case("info of nobody", post("get_info", 404, model_id="none"), "model 'none' does not exist"),
    Case(
        "finish of nobody",
        post("sessions/none/finish", 404, reason={"type": "success"}),
        "session 'none' does not exist",
    ),
    Case("page too long", get(f"checkpoints?limit={HUGE}"), "limit ... less than or equal to 1000"),
    Case(
        "archive",
        get("training_runs/{model}/checkpoints/weights/a/archive"),
        "run `tinsmith export tinker:// ... /weights/a DIRECTORY`",
    ),
    Case("unknown run", get("training_runs/none", 404), "training run 'none' does not exist"),
    Case("unknown address", get("nothing/here", 404), "GET /api/v1/nothing/here is not built"),
    Case("delete the key", refused("auth/apikey/me", 404, b"", method="DELETE"), "keys are not deleted through"),
    Case(
        "base_url with the prefix",
        get("api/v1/client/config", 404),
        "the client adds /api/v1 to its base_url by itself; leave out what",
    ),
]


BODIES = [
    Case("small body over its limit", refused("telemetry", 413, lambda: bytes(9 * 2**20)), "larger than 8388608 bytes"),
    Case("no zstd", refused("forward_backward", 400, b"abc", PROTOBUF, Content_Encoding="zstd"), "not valid zstd"),
    Case(
        "gzip",
        refused("forward_backward", 400, b"abc", PROTOBUF, Content_Encoding="gzip"),
        "Content-Encoding 'gzip' ... send zstd",
    ),
    Case(
        "JSON for protobuf",
        refused("forward_backward", 400, b"{}"),
        "Content-Type 'application/json' ... send application/x-protobuf",
    ),
    Case(
        "protobuf for JSON",
        refused("asample", 400, b"", PROTOBUF),
        "'application/x-protobuf' ... send application/json",
    ),
    Case("form", refused("create_session", 400, b"a=1", "application/x-www-form-urlencoded"), "send application/json"),
    Case(
        "deep JSON",
        refused("create_session", 400, '{"user_metadata":' + '{"a":' * 10**4 + "1" + "}" * 10**4 + "}"),
        "recursion limit",
    ),
    Case("deep lists", refused("asample", 400, "[" * 10**5 + "]" * 10**5), "recursion limit"),
    Case("no JSON", refused("create_model", 400, b"\xff{"), "body: Invalid JSON"),
    Case("half a surrogate", refused("create_session", 400, rb'{"display_name": "\ud800"}'), "body: Invalid JSON"),
    Case(
        "long id",
        post("create_model", 400, session_id="x" * 10**5, model_seq_id=0, base_model="text"),
        "session_id: String should have at most 300 characters",
    ),
]

NAMES_AND_BODIES = [*NAMES, *MODELS, *FUTURES, *BODIES]
