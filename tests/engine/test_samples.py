"""The sampling half of the engine on a real sampler: what fails, what that leaves behind, and who waits for whom."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.bases import new_ref, random_adapter, renderer
from tinsmith.config import SamplingConfig
from tinsmith.engine import samples
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.operations import Operations
from tinsmith.engine.samples import Sampled, Samples
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.status import StatusReporter
from tinsmith.engine.trainer import Trainer
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraPair
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store
from tinsmith.wire import tinker_pb2
from tinsmith.wire.sample import SampledSequence, encode_sample_response


def sample(request_id: str, weights_id: str | None = None, run: int = 1, **asked: Any) -> Sample:
    body = {
        "sampling_session_id": request_id.rpartition("/")[0] or "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    } | asked
    return Sample(request_id, run, "tiny", weights_id, asked.get("num_samples", 1), orjson.dumps(body))


@dataclass
class Bench:
    """Samples on one base model, and what they answer."""

    samples: Samples
    sampler: LocalSampler
    sent: list[Any]

    def settle(self) -> None:
        while self.samples.has_work:
            self.samples.step()

    def answers(self) -> dict[str, Any]:
        """By request: the tokens of each of its samples, or the error. Forgets them."""
        answers = {}
        for message in self.sent:
            assert message.request_id not in answers
            answers[message.request_id] = message.error if isinstance(message, SampleFailed) else tokens_of(message)
        self.sent.clear()
        return answers


def tokens_of(done: SampleDone) -> list[list[int]]:
    return [list(np.frombuffer(s.tokens, dtype="<i4")) for s in tinker_pb2.SampleResponse.FromString(done.payload).sequences]


def bench_of(base: BaseModel, directory: Path, **settings: Any) -> Bench:
    sampler = LocalSampler(base, SamplingConfig(kv_cache_gib=0.01, **settings), logits_chunk=16)
    sent: list[Any] = []
    snapshots = Snapshots({"tiny": base}, Checkpoints(Store.open(directory), CheckpointFiles(directory)), directory / "snapshots", 2**30)
    return Bench(Samples({"tiny": Sampled(sampler, renderer(base))}, snapshots, sent.append), sampler, sent)


def test_samples_go_on_with_newer_inflight_weights_and_say_so(text_base: BaseModel, tmp_path: Path) -> None:
    bench = bench_of(text_base, tmp_path)
    snapshots = bench.samples.snapshots
    first = random_adapter(text_base, seed=1, ref=new_ref("s:train:0/1", "s:train:0"))
    second = random_adapter(text_base, seed=2, ref=new_ref("s:train:0/3", "s:train:0"))
    snapshots.publish("tiny", "s:train:0/inflight", first)
    snapshots.publish("tiny", "s:train:0/1", first.snapshot(new_ref("s:train:0/1")))
    for asked in ("s:train:0/inflight", "s:train:0/1", None):
        bench.samples.add(sample(str(asked), asked))
    bench.samples.step()
    snapshots.publish("tiny", "s:train:0/inflight", second)
    bench.settle()
    versions = {}
    for done in bench.sent:
        assert isinstance(done, SampleDone)
        (sequence,) = tinker_pb2.SampleResponse.FromString(done.payload).sequences
        versions[done.request_id] = [(span.version, span.start, span.end) for span in sequence.versions]
    assert versions == {
        "s:train:0/inflight": [("s:train:0/1", 0, 1), ("s:train:0/3", 1, 4)],
        "s:train:0/1": [("s:train:0/1", 0, 4)],
        "None": [(text_base.name, 0, 4)],
    }


def test_a_sample_is_a_line_for_debugging_and_all_are_summed_up(
    text_base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tinsmith")
    bench = bench_of(text_base, tmp_path)
    snapshots = bench.samples.snapshots
    operations = Operations({}, 64, snapshots.checkpoints, snapshots, 60.0, lambda _: b"")
    reporter = StatusReporter(Trainer(operations, CommandQueue(60.0), 64, lambda _: None), bench.samples, lambda _: None)
    for _ in range(2):
        for number in range(3):
            bench.samples.add(sample(str(number)))
        bench.settle()
        reporter.sum_up()
    reporter.sum_up()
    lines = [(record.levelname, record.getMessage().partition(" in ")[0]) for record in caplog.records]
    assert [line for level, line in lines if level == "INFO"] == ["samples: 3 finished, 12 tokens"] * 2
    assert sum(level == "DEBUG" and line.startswith("sample=") for level, line in lines) == 6


def test_a_sample_that_fails_harms_no_other(text_base: BaseModel, tmp_path: Path) -> None:
    bench = bench_of(text_base, tmp_path)
    misshapen = random_adapter(text_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    bench.samples.snapshots.publish("tiny", "s:train:0/1", misshapen)
    bench.samples.add(sample("healthy"))
    bench.samples.add(sample("broken", "s:train:0/1"))
    bench.samples.add(sample("gone", "s:train:0/2"))
    bench.samples.add(sample("no JSON", prompt=0))
    bench.samples.add(replace(sample("no base"), base_model="other"))
    bench.settle()
    failed = {m.request_id: (m.category, m.gone) for m in bench.sent if isinstance(m, SampleFailed)}
    assert failed == {
        "broken": ("server", False),
        "gone": ("user", True),
        "no JSON": ("user", False),
        "no base": ("server", False),
    }
    assert [m.request_id for m in bench.sent if isinstance(m, SampleDone)] == ["healthy"]
    assert (bench.samples.started, bench.samples.sessions) == ({}, {"tiny": {}})
    assert not any(bench.sampler.cache.users)


def test_an_answer_that_cannot_be_written_fails_its_sample_alone(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(sequences: list[SampledSequence], *more: Any) -> bytes:
        if len(sequences) == 2:
            raise ValueError("too large")
        return encode_sample_response(sequences, *more)

    monkeypatch.setattr(samples, "encode_sample_response", failing)
    bench = bench_of(text_base, tmp_path)
    bench.samples.add(sample("wrong", num_samples=2))
    bench.samples.add(sample("right"))
    bench.settle()
    answers = bench.answers()
    assert answers["wrong"] == "internal error: ValueError('too large')"
    assert len(answers["right"][0]) == 4


def test_a_request_id_that_is_sent_again_is_another_run(text_base: BaseModel, tmp_path: Path) -> None:
    """Given up while it runs, and sent again with another prompt: nothing fails, and the answer is to the second prompt."""
    bench = bench_of(text_base, tmp_path)
    seeded: dict[str, Any] = {"sampling_params": {"max_tokens": 9, "seed": 1, "stop": []}}
    other: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9, 10]}]}} | seeded
    bench.samples.add(sample("alone", **other))
    bench.settle()
    (expected,) = bench.answers().values()
    bench.samples.add(sample("neighbour", **seeded))
    bench.samples.add(sample("twice", **seeded))
    bench.samples.step()
    bench.samples.cancel("twice", run=1)
    bench.samples.add(sample("twice", run=2, **other))
    bench.samples.cancel("twice", run=1)  # a second time, and late
    bench.settle()
    assert [(m.request_id, m.run) for m in bench.sent] == [("neighbour", 1), ("twice", 2)]
    answers = bench.answers()
    assert answers["twice"] == expected
    assert answers["neighbour"] != expected

    bench.samples.add(sample("twice", run=3, **seeded))  # without a word about the one that runs
    bench.samples.step()
    bench.samples.add(sample("twice", run=4, **other))
    bench.settle()
    assert [(m.run, tokens_of(m)) for m in bench.sent] == [(3, answers["neighbour"]), (4, expected)]


def test_a_session_that_ends_takes_its_samples_along(text_base: BaseModel, tmp_path: Path) -> None:
    """Those that run and those that wait; what another session asked for goes on."""
    bench = bench_of(text_base, tmp_path, max_running=2)
    for number in range(9):
        bench.samples.add(sample(f"ended:sample:{number}/0", num_samples=3))
    bench.samples.step()
    bench.samples.add(sample("other:sample:0/0"))
    assert bench.samples.waiting["tiny"].sessions == ["ended", "other"]
    bench.samples.end_session("ended")
    assert bench.samples.load() == (0, 1)
    bench.settle()
    assert list(bench.answers()) == ["other:sample:0/0"]
    assert not any(bench.sampler.cache.users)


def test_a_short_sample_does_not_wait_behind_two_thousand_others(text_base: BaseModel, tmp_path: Path) -> None:
    """Nor for their prompts to be rendered: one of each session is, whatever waits before it."""
    bench = bench_of(text_base, tmp_path, max_running=4)
    for number in range(500):
        bench.samples.add(sample(f"many:sample:0/{number}", num_samples=4, sampling_params={"max_tokens": 100, "stop": []}))
    for _ in range(3):
        bench.samples.step()
    assert bench.samples.load() == (4, 1996)
    assert len(bench.samples.started) < 5
    bench.samples.add(sample("few:sample:0/0"))
    for _ in range(4):
        bench.samples.step()
    assert list(bench.answers()) == ["few:sample:0/0"]


def test_large_requests_are_rendered_one_between_two_steps(text_base: BaseModel, tmp_path: Path) -> None:
    bench = bench_of(text_base, tmp_path)
    blanks = " " * samples.STARTED_BYTES
    for number in range(3):
        message = sample(f"s:sample:0/{number}")
        bench.samples.add(replace(message, payload=message.payload + blanks.encode()))
    for started in (1, 2, 3):
        bench.samples.step()
        assert len(bench.samples.started) == started
    assert not any(started.message.payload for started in bench.samples.started.values())
