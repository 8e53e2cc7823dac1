"""The sampling half of a worker on a real sampler: what fails, what that leaves behind, and who waits for whom.

Invariant: Sampled tokens and scores are finite, or their request fails.
Also: `tests/worker/test_passes.py`, `tests/training/test_peft_format.py`.
"""

import base64
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.bases import new_ref, png, random_adapter, renderer
from tests.engine.here import LONG_S
from tests.worker.test_passes import occupied
from tinsmith.config import SamplingConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraPair
from tinsmith.observing.metrics import WORKER, numbers
from tinsmith.protocol.serving import Sample, SampleDone, SampleEvents, SampleFailed, SampleStopped
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.sampler import SampleResult
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.recorded_sequences import RecordedSequences
from tinsmith.store.store import Store
from tinsmith.wire import tinker_pb2
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TargetIds, TargetLogprobs, TopLogprobs
from tinsmith.wire.sample import SampledSequence, encode_sample_response
from tinsmith.worker import samples
from tinsmith.worker.admission import STARTED_BYTES, SamplingBase
from tinsmith.worker.background import SMALL_BYTES, Background
from tinsmith.worker.samples import Samples
from tinsmith.worker.snapshots import Snapshot, Snapshots

BLANKS = b" " * (SMALL_BYTES + 1)
"""Make any request a large one."""


def sample(request_id: str, weights_id: str | None = None, run: int = 1, stream: bool = False, **asked: Any) -> Sample:
    body = {
        "sampling_session_id": request_id.rpartition("/")[0] or "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    } | asked
    return Sample(request_id, run, "tiny", weights_id, asked.get("num_samples", 1), stream, orjson.dumps(body))


def large(message: Sample) -> Sample:
    """The same, but parsed and rendered in a thread."""
    return replace(message, payload=message.payload + BLANKS)


@dataclass
class Bench:
    """Samples on one base model, and what they answer."""

    samples: Samples
    sampler: LocalSampler
    sent: list[Any]
    recorded: RecordedSequences

    @property
    def base(self) -> SamplingBase:
        return self.samples.bases["tiny"]

    @property
    def beside(self) -> list[Background]:
        """The threads beside the device."""
        return [self.samples.admission.rendering, self.samples.admission.images, self.samples.admission.disk]

    def step(self) -> None:
        """What the worker does between two looks at its device's work."""
        for threads in self.beside:
            threads.deliver()
        self.samples.step()

    def settle(self) -> None:
        """Go on until nothing is left to do, here or in a thread."""
        self.until(lambda: not (self.samples.has_work or any(threads.running for threads in self.beside)))

    def until(self, seen: Callable[[], object]) -> None:
        """Go on until that is true."""
        deadline = time.monotonic() + LONG_S
        while not seen():
            assert time.monotonic() < deadline, "the samples do not come to rest"
            self.step()

    def answers(self) -> dict[str, Any]:
        """By request: the tokens of each of its samples, or the error. Forgets them."""
        answers = {}
        for message in self.sent:
            if isinstance(message, SampleStopped):
                continue
            assert message.request_id not in answers
            answers[message.request_id] = message.error if isinstance(message, SampleFailed) else tokens_of(message)
        self.sent.clear()
        return answers


def tokens_of(done: SampleDone) -> list[list[int]]:
    return [
        list(np.frombuffer(s.tokens, dtype="<i4")) for s in tinker_pb2.SampleResponse.FromString(done.payload).sequences
    ]


def bench_of(base: BaseModel, directory: Path, **settings: Any) -> Bench:
    sampler = LocalSampler(base, SamplingConfig(kv_cache_gib=0.01, **settings), logits_chunk=16)
    sent: list[Any] = []
    snapshots = Snapshots(
        {"tiny": base}, Store.open(directory), CheckpointFiles(directory), directory / "snapshots", 2**30
    )
    rendering, images, disk = (Background(name, 1, lambda: None) for name in ("rendering", "images", "disk"))
    recorded = RecordedSequences(directory, 2**20)
    made = Samples(
        {"tiny": SamplingBase(sampler, renderer(base))}, snapshots, rendering, images, disk, recorded, sent.append
    )
    return Bench(made, sampler, sent, recorded)


@pytest.fixture
def bench(text_base: BaseModel, tmp_path: Path) -> Bench:
    return bench_of(text_base, tmp_path)


def test_samples_go_on_with_newer_inflight_weights_and_say_so(bench: Bench, text_base: BaseModel) -> None:
    snapshots = bench.samples.admission.snapshots
    first, second = (
        random_adapter(text_base, seed=seed, ref=new_ref(f"s:train:0/{seed}", "s:train:0")) for seed in (1, 3)
    )
    snapshots.publish("tiny", "s:train:0/inflight", first)
    snapshots.publish("tiny", "s:train:0/1", first.snapshot(new_ref("s:train:0/1")))
    for asked in ("s:train:0/inflight", "s:train:0/1", None):
        bench.samples.add(sample(str(asked), asked))
    bench.step()
    snapshots.publish("tiny", "s:train:0/inflight", second)
    bench.settle()
    versions = {}
    for done in bench.sent:
        (sequence,) = tinker_pb2.SampleResponse.FromString(done.payload).sequences
        versions[done.request_id] = [(span.version, span.start, span.end) for span in sequence.versions]
    assert versions == {
        "s:train:0/inflight": [("s:train:0/1", 0, 1), ("s:train:0/3", 1, 4)],
        "s:train:0/1": [("s:train:0/1", 0, 4)],
        "None": [(text_base.name, 0, 4)],
    }


def test_a_sample_that_fails_harms_no_other(
    bench: Bench, text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(sequences: list[SampledSequence], *more: Any) -> bytes:
        if len(sequences) == 2:
            raise ValueError("too large")
        return encode_sample_response(sequences, *more)

    monkeypatch.setattr(samples, "encode_sample_response", failing)
    misshapen = random_adapter(text_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    bench.samples.admission.snapshots.publish("tiny", "s:train:0/1", misshapen)
    bench.recorded.close()
    expected = {
        "broken": (sample("broken", "s:train:0/1"), "server", False),
        "gone": (sample("gone", "s:train:0/2"), "user", True),
        "no JSON": (sample("no JSON", prompt=0), "user", False),
        "no large JSON": (large(sample("no large JSON", prompt=0)), "user", False),
        "no base": (replace(sample("no base"), base_model="other"), "server", False),
        "cannot be written": (sample("cannot be written", num_samples=2), "server", False),
        "s:sample:0/1": (sample("s:sample:0/1", record_stability_info=True), "server", False),
    }
    before = counted()
    for message in (sample("healthy"), *(message for message, *_ in expected.values()), large(sample("large"))):
        bench.samples.add(message)
    bench.settle()
    assert {name: value - before.get(name, 0) for name, value in counted().items()} == {
        "tinsmith_samples_total ok": 2,
        "tinsmith_samples_total user": 3,
        "tinsmith_samples_total server": 3,
        "tinsmith_sampled_tokens_total": 8,
    }
    failed = {m.request_id: (m.category, m.gone) for m in bench.sent if isinstance(m, SampleFailed)}
    assert failed == {name: (category, gone) for name, (_, category, gone) in expected.items()}
    assert len([message for message in bench.sent if isinstance(message, SampleStopped)]) == 3  # of those that ran
    answers = bench.answers()
    assert answers["cannot be written"] == "internal error: ValueError('too large')"
    assert "recorded_sequences.sqlite cannot be used: " in answers["s:sample:0/1"]
    assert [len(answers[name][0]) for name in ("healthy", "large")] == [4, 4]
    assert (bench.samples.load(), bench.base.started, bench.base.sessions) == ((0, 0), {}, {})
    assert not any(bench.sampler.cache.users)


def counted() -> dict[str, float]:
    """Samples of the base model by outcome, and their tokens."""
    names = ("tinsmith_samples_total", "tinsmith_sampled_tokens_total")
    return {
        " ".join([name, *filter(None, [labels.get("outcome")])]): value
        for name, labels, value in numbers(WORKER)
        if name in names and labels["base_model"] == "tiny"
    }


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"num_samples": 2, "topk_sample_logprobs": 3},
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 2},
        {"prompt_alt_tokens_k": 2},
    ],
    ids=lambda asked: next(iter(asked), "plain"),
)
def test_what_is_not_finite_is_an_error_of_its_request(
    bench: Bench, text_base: BaseModel, asked: dict[str, Any]
) -> None:
    """Weights of NaN give tokens of log-probability NaN. Who samples others beside them gets theirs."""
    sick = random_adapter(text_base, b_scale=np.nan)
    bench.samples.admission.snapshots.publish("tiny", "s:train:0/1", sick)
    bench.samples.add(sample("sick", "s:train:0/1", **asked))
    bench.samples.add(sample("healthy", **asked))
    bench.settle()
    assert {m.request_id: m.category for m in bench.sent if isinstance(m, SampleFailed)} == {"sick": "user"}
    answers = bench.answers()
    assert "a log-probability is NaN or infinite" in answers["sick"]
    assert [len(tokens) for tokens in answers["healthy"]] == [4] * asked.get("num_samples", 1)


@pytest.mark.parametrize("wrong", [None, float("nan"), float("-inf")])
@pytest.mark.parametrize("where", ["sample", "top", "prompt", "targets"])
def test_what_another_sampler_answers_is_looked_at_too(where: str, wrong: float | None) -> None:
    """VLLM writes NaN as null. Only a token that was drawn cannot be impossible."""
    number = np.array([-1.0, wrong], dtype=np.float32)
    top = TopLogprobs(np.zeros((2, 1), dtype=np.int32), number[:, None])
    logprobs: Any = [-1.0, wrong if where == "sample" else -2.0]
    sequence = SampledSequence([5, 6], logprobs, "length", top if where == "top" else None)
    scores = np.array([np.nan, 0.0, *number], dtype=np.float32)
    targets = TargetLogprobs(TargetIds((1, 2), np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)), number)
    answers = PromptAnswers(
        logprobs=scores if where == "prompt" else None, targets=targets if where == "targets" else None
    )
    result = SampleResult("x", [sequence], answers, prompt_tokens=4, cached_tokens=0)
    is_possible = wrong == float("-inf") and where != "sample"
    with nullcontext() if is_possible else pytest.raises(UserError, match="a log-probability is NaN or infinite"):
        result.check_finite(PromptQuestions(logprobs=True))


def test_what_was_sampled_is_recorded_before_its_client_is_answered(bench: Bench) -> None:
    """And what an ended session sampled is forgotten."""
    with occupied(bench.samples.admission.disk):
        bench.samples.add(sample("s:sample:0/1", num_samples=2, record_stability_info=True))
        bench.samples.add(sample("s:sample:0/2"))
        bench.until(lambda: bench.sent and not bench.base.started)
        assert bench.answers().keys() == {"s:sample:0/2"}
    bench.settle()
    (done,) = bench.sent
    sequences = tinker_pb2.SampleResponse.FromString(done.payload).sequences
    found = bench.recorded.find([f"s:sample:0/{number}/{index}" for number in (1, 2) for index in (0, 1)])
    assert list(found) == ["s:sample:0/1/0", "s:sample:0/1/1"]
    for kept, sent in zip(found.values(), sequences, strict=True):
        assert kept.prompt_length == 3
        assert (kept.tokens.tobytes(), kept.logprobs.tobytes()) == (sent.tokens, sent.logprobs)
    bench.samples.end_session("another")
    bench.settle()
    assert len(bench.recorded.find(found)) == 2
    bench.samples.end_session("s")
    bench.settle()
    assert bench.recorded.find(found) == {}


def test_a_request_id_that_is_sent_again_is_another_run(bench: Bench) -> None:
    """Given up while it runs, and sent again with another prompt: nothing fails, and the answer is to the second
    prompt."""
    seeded: dict[str, Any] = {"sampling_params": {"max_tokens": 9, "seed": 1, "stop": []}}
    other: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9, 10]}]}} | seeded
    bench.samples.add(sample("alone", **other))
    bench.settle()
    (expected,) = bench.answers().values()
    bench.samples.add(sample("neighbour", **seeded))
    bench.samples.add(sample("twice", **seeded))
    bench.step()
    bench.samples.cancel("twice", run=1)
    bench.samples.add(sample("twice", run=2, **other))
    bench.samples.cancel("twice", run=1)  # a second time, and late
    bench.settle()
    done = [message for message in bench.sent if isinstance(message, SampleDone)]
    assert [(message.request_id, message.run) for message in done] == [("neighbour", 1), ("twice", 2)]
    answers = bench.answers()
    assert answers["twice"] == expected
    assert answers["neighbour"] != expected
    bench.samples.add(sample("twice", run=3, **seeded))  # without a word about the one that runs
    bench.step()
    bench.samples.add(sample("twice", run=4, **other))
    bench.settle()
    assert [(m.run, tokens_of(m)) for m in bench.sent] == [(3, answers["neighbour"]), (4, expected)]


def image_sample(request_id: str, number: int, **asked: Any) -> Sample:
    image = {"type": "image", "format": "png", "data": base64.b64encode(png(number)).decode()}
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}, image, {"type": "encoded_text", "tokens": [3]}]
    return sample(request_id, prompt={"chunks": chunks}, **asked)


def test_sessions_share_the_room_for_prompts_that_are_decoded(vision_base: BaseModel, tmp_path: Path) -> None:
    """A few hundred bytes of an image become megabytes of pixel values. Each session has one in any case."""
    bench = bench_of(vision_base, tmp_path, max_running=4)
    with occupied(bench.samples.admission.images):
        for number in range(32):
            bench.samples.add(image_sample(f"s{number % 8}:sample:0/{number}", number))
        for _ in range(24):
            bench.step()
        assert bench.base.decoding.keys() == {f"s{number}" for number in range(8)}
        assert bench.base.decoding.total() <= 4 + 4 / 2 + 4 / 3 + 8
    bench.settle()
    assert len(bench.answers()) == 32


def test_no_text_waits_for_images_large_or_small(vision_base: BaseModel, tmp_path: Path) -> None:
    """Whatever a session sends of images, and however many sequences it wants of them.

    Once an image is decoded, it takes no thread.
    """
    bench = bench_of(vision_base, tmp_path, max_running=4)
    small, blanks = image_sample("s:sample:0/0", 5, num_samples=3), b" " * STARTED_BYTES
    assert len(small.payload) < SMALL_BYTES
    images = [image_sample(f"s:sample:{number}/0", number) for number in range(1, 4)]
    with occupied(bench.samples.admission.images):
        bench.samples.add(small)
        for message in images:
            bench.samples.add(replace(message, payload=message.payload + blanks))
        texts = [large(sample(f"text:sample:0/{number}")) for number in range(3)] + [sample("text:sample:0/3")]
        for message in texts:
            bench.samples.add(message)
        bench.until(lambda: len(bench.sent) == 4 and bench.base.decoding["s"] >= 4)
        assert sum(bench.samples.admission.rendering_bytes.values()) > STARTED_BYTES
        assert bench.answers().keys() == {message.request_id for message in texts}
        # The others wait for their session's bytes
        assert (bench.samples.load()[0], bench.base.decoding["s"]) == (0, 4)
        assert not any(started.message.payload for started in bench.base.started.values())
    bench.settle()
    assert len(bench.answers()) == 4
    assert (bench.samples.admission.rendering_bytes, bench.base.decoding, bench.base.on_the_way) == ({}, {}, 0)
    with occupied(bench.samples.admission.images):
        bench.samples.add(image_sample("s:sample:9/0", 5))
        bench.until(lambda: bench.sent)
    assert len(bench.answers()["s:sample:9/0"][0]) == 4


@pytest.mark.parametrize("how", ["sample", "session"])
def test_a_sample_that_is_cancelled_while_it_is_rendered_never_runs(bench: Bench, how: str) -> None:
    with occupied(bench.samples.admission.rendering):
        bench.samples.add(large(sample("s:sample:0/0")))
        bench.step()
        assert bench.samples.load() == (0, 1)
        if how == "sample":
            bench.samples.cancel("s:sample:0/0", run=1)
        else:
            bench.samples.end_session("s")
        assert bench.samples.load() == (0, 0)
        bench.samples.add(sample("s:sample:0/0", run=2))  # its client sends the id again
        bench.until(lambda: bench.sent)
    bench.settle()
    assert [(message.request_id, message.run) for message in bench.sent] == [("s:sample:0/0", 2)]
    assert (bench.base.started, bench.base.sessions, bench.samples.admission.rendering_bytes) == ({}, {}, {})
    assert not any(bench.sampler.cache.users)


@pytest.mark.parametrize("how", ["cancelled", "ended", "failed"])
def test_what_a_sample_has_cost_is_told_though_its_client_gets_nothing(bench: Bench, how: str) -> None:
    """Or who always cancels has all devices for nothing."""
    running = replace(sample("s:sample:0/0", sampling_params={"max_tokens": 90, "stop": []}), tenant="team")
    bench.samples.add(running)
    for _ in range(3):
        bench.step()
    (started,) = bench.base.started.values()
    assert started.gpu_seconds > 0
    if how == "cancelled":
        bench.samples.cancel("s:sample:0/0", run=1)
    elif how == "ended":
        bench.samples.end_session("s")
    else:
        bench.samples._abandon(bench.base, UserError("broken"))
    assert bench.sent[0] == SampleStopped("team", "tiny", "s", started.gpu_seconds)
    assert len(bench.sent) == (2 if how == "failed" else 1)


# ---- Weights that are read


def spilled(bench: Bench, base: BaseModel, *snapshot_ids: str) -> None:
    """Publish snapshots that are on the disk only."""
    snapshots = bench.samples.admission.snapshots
    snapshots.memory_bytes = 0
    for number, snapshot_id in enumerate((*snapshot_ids, "s:train:99/1")):
        snapshots.publish("tiny", snapshot_id, random_adapter(base, seed=number, ref=new_ref(snapshot_id)))
    snapshots.spill.settle()
    snapshots.memory_bytes = 2**30


def test_weights_are_read_in_a_thread_once_for_all_that_wait_for_them_who_alone_fail_with_it(
    bench: Bench, text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = "s:train:0/1", "s:train:1/1"
    spilled(bench, text_base, good, bad)
    counts, failing, find = Counter[str](), {bad}, bench.samples.admission.snapshots.reader

    def reader(base_model: str, weights_id: str) -> Callable[[], Snapshot]:
        def read() -> Snapshot:
            counts[weights_id] += 1
            if weights_id in failing:
                raise OSError("the disk is gone")
            return found()

        found = find(base_model, weights_id)
        return read

    monkeypatch.setattr(bench.samples.admission.snapshots, "reader", reader)
    with occupied(bench.samples.admission.disk):
        for number in range(2):
            bench.samples.add(sample(f"good/{number}", good))
            bench.samples.add(sample(f"bad/{number}", bad))
        bench.samples.add(sample("base/0"))
        bench.until(lambda: bench.sent)
        assert list(bench.answers()) == ["base/0"]  # what needs no reading does not wait for it
        assert bench.samples.load() == (0, 4)
    bench.settle()
    answers = bench.answers()
    assert [answers[f"bad/{number}"] for number in range(2)] == ["internal error: OSError('the disk is gone')"] * 2
    assert [len(answers[f"good/{number}"][0]) for number in range(2)] == [4, 4]
    assert counts == {good: 1, bad: 1}
    failing.clear()
    bench.samples.add(sample("good/2", good))
    bench.samples.add(sample("bad/2", bad))  # it is tried again
    bench.settle()
    answers = bench.answers()
    assert [len(answers[name][0]) for name in ("good/2", "bad/2")] == [4, 4]
    assert counts == {good: 1, bad: 2}


def test_a_sample_that_is_cancelled_while_its_weights_are_read_never_runs(bench: Bench, text_base: BaseModel) -> None:
    spilled(bench, text_base, "s:train:0/1")
    with occupied(bench.samples.admission.disk):
        for number in range(2):
            bench.samples.add(sample(f"s:sample:0/{number}", "s:train:0/1"))
        bench.step()
        bench.samples.cancel("s:sample:0/0", run=1)
    bench.settle()
    assert list(bench.answers()) == ["s:sample:0/1"]
    assert (bench.samples.admission.needing, bench.base.on_the_way) == ({}, 0)


# ---- Streams


def test_a_stream_is_told_its_tokens_in_one_message_a_step(bench: Bench) -> None:
    bench.samples.add(sample("one:sample:0/0", stream=True, num_samples=2))
    bench.samples.add(sample("two:sample:0/0", stream=True))
    bench.samples.add(sample("silent:sample:0/0"))
    told: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    done: dict[str, SampleDone] = {}
    several = 0
    while bench.samples.has_work:
        before = len(bench.sent)
        bench.step()
        events = [message for message in bench.sent[before:] if isinstance(message, SampleEvents)]
        assert len(events) <= 1
        for request_id, run, index, tokens, logprobs in (event for message in events for event in message.tokens):
            assert (run, request_id in done) == (1, False)
            all_tokens, all_logprobs = told.setdefault((request_id, index), ([], []))
            all_tokens += tokens
            all_logprobs += logprobs
        several += any(len({request_id for request_id, *_ in message.tokens}) == 2 for message in events)
        done |= {message.request_id: message for message in bench.sent[before:] if isinstance(message, SampleDone)}
    assert several, "the streams never came together"
    for request_id, message in done.items():  # the server passes over tokens that come behind the end
        behind = [each for each in bench.sent[bench.sent.index(message) :] if isinstance(each, SampleEvents)]
        assert request_id not in {event[0] for each in behind for event in each.tokens}
    assert sorted(told) == [("one:sample:0/0", 0), ("one:sample:0/0", 1), ("two:sample:0/0", 0)]
    for (request_id, index), (tokens, logprobs) in told.items():
        sequence = tinker_pb2.SampleResponse.FromString(done[request_id].payload).sequences[index]
        assert tokens == list(np.frombuffer(sequence.tokens, dtype="<i4"))
        np.testing.assert_array_equal(
            np.array(logprobs, dtype=np.float32), np.frombuffer(sequence.logprobs, dtype="<f4")
        )
    assert sorted(done) == ["one:sample:0/0", "silent:sample:0/0", "two:sample:0/0"]


def test_tenants_have_equal_parts_of_a_device_however_many_sessions_they_have(
    text_base: BaseModel, tmp_path: Path
) -> None:
    bench = bench_of(text_base, tmp_path, max_running=16)
    for number in range(24):
        for session in ("a", "b", "c"):
            bench.samples.add(replace(sample(f"{session}:sample:0/{number}"), tenant="many"))
    for number in range(24):
        bench.samples.add(replace(sample(f"d:sample:0/{number}"), tenant="one"))
    bench.settle()
    sessions = [message.request_id[0] for message in bench.sent]
    assert sorted(sessions) == sorted("abcd" * 24)
    last = max(place for place, session in enumerate(sessions) if session == "d")
    assert last < 2 * 24 + 20  # it is 95 where sessions take turns
    assert not bench.base.tenants
