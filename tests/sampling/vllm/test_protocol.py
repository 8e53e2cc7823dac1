"""HTTP with a vLLM server, Tinker's sampling parameters as vLLM's, and vLLM's replies as results, those of 0.26 too."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.bases import text
from tests.sampling.vllm.answering import abort, answering, in_a_loop
from tinsmith.errors import TinsmithError, UserError
from tinsmith.sampling.vllm.protocol import (
    RefusedError,
    ServerFailedError,
    ServerLostError,
    check_parameters,
    in_new_form,
    longest_answer,
    sampling_params,
    sequences_of,
    vllm_seed,
)
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule


async def answer(request: web.Request) -> web.StreamResponse:
    match request.path:
        case "/refuse":
            return web.json_response(
                {"error": {"message": f"no such model: {await request.text()}", "code": 404}}, status=404
            )
        case "/fail":
            return web.Response(text="Internal Server Error", status=500)
        case "/json":
            return web.json_response({"mode": request.query["mode"], "body": await request.json()})
        case "/vanish":
            abort(request)
        case "/stream":  # as many numbers as it is asked for, and then what `last` says
            asked = await request.json()
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            for number in range(asked["numbers"]):
                await reply.write(b'data: {"number": %d}\n\n' % number)
            if asked["last"] == "abort":
                abort(request)
            elif asked["last"]:
                await reply.write(b"data: %b\n\n" % asked["last"].encode())
            return reply
    return web.Response(text="Success: LoRA adapter loaded.")


@in_a_loop
async def test_answers_are_json_or_nothing_and_errors_keep_the_servers_text(tmp_path: Path) -> None:
    """A server that goes away is lost, and so is what comes after."""
    async with answering(tmp_path, answer) as connection:
        assert await connection.post("/json", {"a": 1}, mode="wait") == {"mode": "wait", "body": {"a": 1}}
        assert await connection.post("/ok") is None
        with pytest.raises(RefusedError, match=r'vLLM answered 404 to /refuse: no such model: \{"a":1\}'):
            await connection.post("/refuse", {"a": 1})
        with pytest.raises(ServerFailedError, match="vLLM answered 500 to /fail: Internal Server Error"):
            await connection.post("/fail")
        with pytest.raises(RefusedError, match="no such model"):
            await anext(connection.stream("/refuse", {}))
        with pytest.raises(ServerLostError, match="went away"):
            await connection.post("/vanish")
        await connection.close()
        with pytest.raises(ServerLostError, match="before it was asked"):
            await connection.post("/ok")


@in_a_loop
async def test_a_request_after_a_failure_takes_another_connection(tmp_path: Path) -> None:
    """As vLLM does, this server keeps the connection in its words, but what comes on it after a failure is lost."""
    failed: list[asyncio.Transport | None] = []

    async def fail_once(request: web.Request) -> web.StreamResponse:
        if request.transport in failed:
            abort(request)
        failed.append(request.transport)
        return web.Response(status=500 if len(failed) == 1 else 200)

    async with answering(tmp_path, fail_once) as connection:
        with pytest.raises(ServerFailedError):
            await connection.post("/")
        assert await connection.post("/") is None


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        ("[DONE]", StopAsyncIteration, "^$"),
        ("abort", ServerLostError, "went away"),
        ("", ServerLostError, "ended an answer before it was whole"),
        ('{"error": {"message": "no memory left"}}', ServerFailedError, "while it answered /stream: no memory left"),
    ],
)
@in_a_loop
async def test_a_stream_is_read_event_by_event(tmp_path: Path, last: str, error: type[Exception], message: str) -> None:
    """Until it ends or breaks off."""
    asked = {"numbers": 2, "last": last}
    async with answering(tmp_path, answer) as connection, aclosing(connection.stream("/stream", asked)) as events:
        assert [await anext(events), await anext(events)] == [{"number": 0}, {"number": 1}]
        with pytest.raises(error, match=message):
            await anext(events)


def request(
    questions: PromptQuestions | None = None, topk: int = 0, stop: StopRule | None = None, **params: Any
) -> SampleRequest:
    given = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None} | params
    rule = stop or StopRule(eos=True, strings=(), token_ids=())
    return SampleRequest("s", 0, 1, [text(1)], SamplingParams(**given, stop=rule), questions or PromptQuestions(), topk)


def sent(asked: SampleRequest, first: int = 0) -> dict[str, Any]:
    return sampling_params(asked, 4, {7, 9}, 100, first, 8)


SCORED = PromptQuestions(logprobs=True)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            request(stop=StopRule(True, ("ab",), (3,))),
            {"stop": ["ab"], "stop_token_ids": [3, 7, 9], "detokenize": True},
        ),
        (
            request(stop=StopRule(False, (), ())),
            {"stop": [], "stop_token_ids": [], "ignore_eos": True, "detokenize": False},
        ),
        # The sampled token is asked for beside the likeliest.
        *[(request(topk=topk), {"logprobs": logprobs}) for topk, logprobs in ((0, 0), (5, 6), (100, 100))],
        # All samples are in one reply, RequestOutputKind.FINAL_ONLY: vLLM 0.26 would send what it has after each step,
        # and answer with what it sent last, without samples that had ended before.
        (request(), {"output_kind": 2}),
        (request(PromptQuestions(logprobs=True, topk=3)), {"prompt_logprobs": 3}),
        (request(SCORED), {"prompt_logprobs": 0}),
        # Greedy needs no truncation.
        (request(temperature=0.0, top_k=3, top_p=0.5), {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
    ],
)
def test_tinkers_parameters_are_vllms(asked: SampleRequest, expected: dict[str, Any]) -> None:
    check_parameters(asked)
    assert expected.items() <= sent(asked).items()


def test_seeds_of_neighbours_share_no_samples_and_only_the_first_answer_about_the_prompt() -> None:
    assert "seed" not in sent(request())
    assert sent(request(seed=5), first=64)["seed"] == vllm_seed(5) + 64
    assert abs(vllm_seed(5) - vllm_seed(6)) > 10**6
    assert 0 <= vllm_seed(2**64 - 1) < 2**56
    assert "prompt_logprobs" not in sent(request(SCORED), first=64)


def test_what_vllm_would_do_differently_or_has_no_room_for_is_refused() -> None:
    """An answer that is scored again leaves a token free."""
    for refused in (request(temperature=0.009), request(temperature=0.5, top_k=2), request(temperature=0.5, top_p=0.9)):
        with pytest.raises(UserError, match=r"temperature"):
            check_parameters(refused)
    for asked, longest in (
        (request(max_tokens=None), 10),
        (request(max_tokens=10), 10),
        (request(max_tokens=None, top_k=2), 9),
    ):
        assert longest_answer(asked, 90, 100, "tiny") == longest
    for asked, words in (
        (request(max_tokens=11), "90 \\+ 11 > 100"),
        (request(max_tokens=10, top_k=2), "max_tokens=9"),
    ):
        with pytest.raises(UserError, match=words):
            longest_answer(asked, 90, 100, "tiny")


def older_reply(**changed: Any) -> dict[str, Any]:
    """One sample of two tokens, as 0.26 answers it."""
    tokens = [{"token": f"token_id:{token}", "logprob": -float(token)} for token in (5, 7)]
    content = [token | {"top_logprobs": [token]} for token in tokens]
    return {
        "choices": [
            {"index": 0, "finish_reason": "length", "token_ids": [5, 7], "logprobs": {"content": content}} | changed
        ]
    }


def test_an_older_reply_is_read_and_a_newer_one_stays_as_it_is() -> None:
    newer = in_new_form(older_reply())
    (sequence,) = sequences_of(newer, 1, 1, None, "m/3")
    assert sequence.topk is not None
    assert (sequence.tokens, sequence.logprobs, sequence.topk.token_ids.tolist()) == ([5, 7], [-5.0, -7.0], [[5], [7]])
    newer["choices"][0]["weight_versions"] = [{"version": "a", "start": 0, "end": 2}]
    before = repr(newer)
    assert repr(in_new_form(newer)) == before


def test_logprobs_of_other_tokens_requests_that_failed_and_samples_of_other_full_weights_are_errors() -> None:
    with pytest.raises(TinsmithError, match="other tokens than it sampled"):
        sequences_of(in_new_form(older_reply(token_ids=[5, 8])), 1, 0, None, "m/3")
    with pytest.raises(ServerFailedError):
        in_new_form(older_reply(finish_reason="error", token_ids=[], logprobs=None))
    reply = in_new_form(older_reply())
    for versions in ([], [{"version": "old", "start": 0, "end": 2}], [{"version": "old"}, {"version": "new"}]):
        reply["choices"][0]["weight_versions"] = versions
        with pytest.raises(TinsmithError, match="was asked for from weights 'new'; vLLM answered with"):
            sequences_of(reply, 1, 0, "new", "m/3")
    reply["choices"][0]["weight_versions"] = [{"version": "new", "start": 0, "end": 2}]
    assert sequences_of(reply, 1, 0, "new", "m/3")
