"""Several workers as one: what is asked of all is answered once, and none goes on without the others."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.here import LONG_S, Wire
from tests.engine.light_worker import FACTS
from tests.engine.test_worker_process import Watched, engine_with, link_of_an_engine
from tinsmith.config import Config, DistributedConfig, SamplingConfig, ServerConfig
from tinsmith.engine.worker_group import LOOK_FOR_HOSTS_S, WorkerGroup
from tinsmith.engine.worker_process import SETTLED, Liveness, WorkerProcess, hanging
from tinsmith.protocol import child_process
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import writer_of
from tinsmith.protocol.questions import Answered, FindMeeting, MeetingPort
from tinsmith.protocol.serving import (
    Alive,
    CancelSample,
    EndSession,
    ForgetCheckpoint,
    Ready,
    Recovering,
    Sample,
    SampleDone,
    SampleFailed,
)
from tinsmith.protocol.work import (
    Answer,
    CallFailed,
    ClearGradients,
    Copied,
    CopyEnded,
    CreateModel,
    DeleteModel,
    Drop,
    ExportModel,
    FinishSave,
    LoadModel,
    OptimStep,
    PartWritten,
    PassDone,
    Prepare,
    Prepared,
    PrepareFailed,
    RunPass,
    SaveModel,
    TakeSnapshot,
    WorkerReady,
)

KILLED = "the worker process ended unexpectedly (signal 9)"
PATH = "tinker://a/weights/b"
MODEL = "b"
WRITER = writer_of(MODEL, 2)
"""The worker that saves this model where one does for all: the second, so that it is not taken for the first."""


class SpokenFor(WorkerProcess):
    """A stand-in for a worker process: it notes what it is told; the test says what it answers and when it ends."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Wire())  # type: ignore[arg-type]
        self.told: list[Message] = []
        self.says: list[Message] = []
        self.end: str | None = None

    def start_if_due(self) -> None:
        self.state = "starting"

    def send(self, message: Message) -> None:
        self.told.append(message)

    def receive(self) -> list[Message]:
        said, self.says = self.says, []
        return said

    def kill(self, wait: bool = True) -> None:
        """Be gone, and tell so if nobody has asked for it."""
        self.end, self.state = self.end or f"({self.fault})", "down"

    def ended(self) -> str | None:
        reason, self.end = self.end, None
        return reason


class Spoken:
    """A group whose workers are the test's."""

    def __init__(self, data_dir: Path, count: int, sampler: str, shard: str) -> None:
        sampling, distributed = SamplingConfig(sampler=sampler), DistributedConfig(count, shard)
        config = Config(["tiny=unused"], str(data_dir), sampling=sampling, distributed=distributed)
        self.group = WorkerGroup(config, Wire(), count)  # type: ignore[arg-type]
        self.workers = [SpokenFor(worker.config) for worker in self.group.workers]
        self.group.workers[:] = self.workers

    def ready(self, rank: int) -> list[Message]:
        """What comes of a worker that is ready. It trains and samples other lengths than the others."""
        worker = self.workers[rank]
        facts = ModelFacts(**FACTS.to_dict() | {"max_trained": 24 - rank, "max_sampled": 20 + rank})
        worker.state, worker.device, worker.models = "ready", f"cpu {rank}", {"tiny": facts}
        return self.says(rank, WorkerReady([facts.to_dict()], worker.device))

    def start(self) -> "Spoken":
        """All start, and are ready."""
        self.group.start_if_due()
        for rank in range(len(self.workers)):
            self.ready(rank)
        return self

    def says(self, rank: int, *messages: Message) -> list[Any]:
        """What the group tells when a worker says this."""
        self.workers[rank].says += messages
        return self.group.receive()

    def told(self) -> list[list[Any]]:
        """What each was told since the last call."""
        told = [worker.told[:] for worker in self.workers]
        for worker in self.workers:
            worker.told.clear()
        return told

    def ask(self, call: Message, replies: Mapping[int, Message]) -> list[Any]:
        """What the group tells of a call when the last has replied, in this order; before, it tells nothing."""
        self.group.send(call)
        *early, last = [self.says(rank, reply) for rank, reply in replies.items()]
        assert not any(early)
        return last


@pytest.fixture
def speak(tmp_path: Path) -> Iterator[Callable[..., Spoken]]:
    """Make a group; nothing of its files is left."""
    made: list[Spoken] = []

    def make(count: int = 2, sampler: str = "local", shard: str = "none") -> Spoken:
        made.append(Spoken(tmp_path / "data", count, sampler, shard))
        return made[-1]

    yield make
    for spoken in made:
        spoken.group.stop(0.0)


@pytest.fixture
def pair(speak: Callable[..., Spoken]) -> Spoken:
    """Two workers that are ready."""
    return speak().start()


@pytest.fixture
def sharing(speak: Callable[..., Spoken]) -> Spoken:
    """Two workers that share the weights, and are ready."""
    return speak(sampler="none", shard="weights").start()


ORDERS = ((0, 1), (1, 0))
"""In which two workers answer."""


def failed(number: int, rank: int) -> CallFailed:
    """What a worker says that cannot do what it is called for."""
    return CallFailed(number, "TinsmithError", f"worker {rank} cannot")


CREATE = CreateModel(11, "tiny", MODEL, {})
STEP = OptimStep(13, "tiny", MODEL, {}, copy="a kept copy")
LOAD = LoadModel(14, "tiny", MODEL, PATH, "dir", True)


# ---- Started


def test_a_group_is_ready_once_when_its_last_worker_is(speak: Callable[..., Spoken]) -> None:
    """It trains what the last can and samples what the first can. What was sent before reached none."""
    spoken = speak(3)
    group = spoken.group
    group.start_if_due()
    assert (spoken.ready(0), spoken.ready(2)) == ([], [])
    assert (group.is_ready, group.models) == (False, {})
    group.send(CREATE)
    facts = ModelFacts(**FACTS.to_dict() | {"max_trained": 22, "max_sampled": 20})
    assert spoken.ready(1) == [WorkerReady([facts.to_dict()], "cpu 0")]
    assert (group.is_ready, group.models) == (True, {"tiny": facts})
    assert [(each["device"], each["state"]) for each in group.status.workers] == [
        (f"cpu {rank}", "ready") for rank in range(3)
    ]
    assert spoken.told() == [[], [], []]


def test_workers_on_other_hosts_start_when_these_are_known_and_are_told_of_one_meeting(
    speak: Callable[..., Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken, known = speak(), list[str]()
    monkeypatch.setattr(spoken.group.launcher, "hosts", lambda: known or None)
    spoken.group.start_if_due()
    assert ({worker.state for worker in spoken.workers}, 0 < spoken.group.wait_s <= LOOK_FOR_HOSTS_S) == (
        {"down"},
        True,
    )
    known += ["10.0.0.1", "10.0.0.2"]
    spoken.group._look_at = 0.0  # it is time to look again
    for _ in range(2):
        assert [worker.place.meeting for worker in spoken.start().workers] == ["tcp://10.0.0.1", "tcp://10.0.0.2"]
        first, second = (worker.answers or pytest.fail("none answers") for worker in spoken.workers)
        assert second(FindMeeting()) == MeetingPort("", 0)  # that of the workers before is none of theirs
        assert first(MeetingPort("10.0.0.1", 7)) == Answered()
        assert second(FindMeeting()) == MeetingPort("10.0.0.1", 7)
        spoken.workers[1].end = KILLED
        assert spoken.group.ended() == f"worker 1 of 2 on 10.0.0.2: {KILLED}"


@pytest.mark.parametrize(
    ("visible", "sampler", "devices", "samplers"),
    [
        ("3,5", "local", ["cuda:0", "cuda:1"], ["local", "local"]),
        ("3,5", "vllm", ["cuda:0", "cuda:1"], ["vllm", "none"]),
        ("3,5", "vllm", ["auto"], ["vllm"]),
        ("", "local", ["cpu", "cpu"], ["local", "local"]),
    ],
)
def test_each_worker_has_a_gpu_of_its_own_and_the_first_has_the_vllm_servers(
    speak: Callable[..., Spoken],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    sampler: str,
    devices: list[str],
    samplers: list[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count = len(devices)
    configs = [worker.config for worker in speak(count, sampler).workers]
    assert [config.models.device for config in configs] == devices
    assert [config.sampling.sampler for config in configs] == samplers
    assert [config.distributed.workers for config in configs] == [count] * count  # the first places vLLM behind them


# ---- Asked


def test_what_all_are_asked_for_is_answered_once_and_after_the_last(pair: Spoken) -> None:
    """What fails on all is a failure like that of one worker.

    Of a step, the worker speaks that alone keeps a copy of it.
    """
    calls: list[Any] = [CREATE, TakeSnapshot(12, "tiny", MODEL, "b/3", False), STEP, LOAD]
    for call, order, fails in product(calls, ORDERS, (False, True)):
        replies = {rank: failed(call.number, rank) if fails else Answer(call.number, {"rank": rank}) for rank in order}
        assert pair.ask(call, replies) == [replies[WRITER if call is STEP and not fails else 0]]
        assert pair.told() == [
            [call if rank == WRITER or call is not STEP else replace(STEP, copy="")] for rank in range(2)
        ]
    for order_of_all in [
        ClearGradients("tiny", "a"),
        DeleteModel("tiny", "a"),
        Drop(["a/1", "a/2"]),
        EndSession("s", False),
    ]:
        pair.group.send(order_of_all)
        assert pair.told() == [[order_of_all]] * 2
    assert pair.group.work.awaited == {}


def test_a_copy_of_a_step_is_told_behind_its_answer_if_it_is_complete_before_all_have_taken_it(pair: Spoken) -> None:
    """Before it the engine knows of no copy, and would wait for the news of this one for good."""
    step, ended = replace(STEP, copy="kept/1"), CopyEnded(MODEL, "kept/1", True, 0.0)
    other = replace(ended, directory="kept/0")
    pair.group.send(step)
    assert pair.says(WRITER, Answer(step.number, {"rank": WRITER}), ended, other) == [other]
    assert pair.says(1 - WRITER, Answer(step.number, {})) == [Answer(step.number, {"rank": WRITER}), ended]
    assert pair.says(WRITER, ended) == [ended]


@pytest.mark.parametrize("kind", [SaveModel, ExportModel])
def test_what_one_worker_saves_for_all_is_answered_by_that_one_and_looked_up_again_by_all(
    pair: Spoken, kind: type[Any]
) -> None:
    """Different models have different workers, the same model always the same.

    A path may have been there before, and been sampled.
    """
    writers = [writer_of(f"model {number}", 2) for number in range(8)]
    assert {*writers} == {0, 1}
    for number, writer in enumerate(writers):
        save = kind(number, "tiny", f"model {number}", True if kind is SaveModel else [], {"tinker_path": PATH})
        reply, forget = (
            (failed(number, writer), []) if number % 3 == 0 else (Answer(number, {}), [ForgetCheckpoint(PATH)])
        )
        pair.group.send(save)
        assert pair.says(writer, Copied(number)) == [Copied(number)]
        assert pair.says(writer, reply) == [reply]
        assert pair.told() == [[*([save] if rank == writer else []), *forget] for rank in range(2)]
    assert pair.group.work.awaited == {}


def saved_to(directory: str) -> SaveModel:
    """A save of the model."""
    return SaveModel(1, "tiny", MODEL, True, {"tinker_path": PATH, "directory": directory})


PARTS = [PartWritten(1, [("a", rank, 1, 0)]) for rank in range(2)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "replies",
    [
        PARTS,
        [failed(1, 0), PARTS[1]],
        [PARTS[0], failed(1, 1)],
        [failed(1, 0), failed(1, 1)],
        [failed(1, 0), Answer(1, {})],
    ],
    ids=["written", "first fails", "second fails", "both fail", "whole"],
)
def test_a_save_of_all_is_finished_by_one_when_all_have_written_or_deleted_if_one_has_failed(
    sharing: Spoken, replies: list[Message], order: tuple[int, int]
) -> None:
    """All look it up again: any of them may have sampled one of this path before."""
    assert sharing.ask(saved_to("there"), {rank: replies[rank] for rank in order}) == []
    error = next((reply for reply in replies if isinstance(reply, CallFailed)), None)
    pieces = [piece for reply in replies if isinstance(reply, PartWritten) for piece in reply.pieces]
    why = (error.error_type, error.error) if error else ("", "")
    finish = FinishSave(1, "there", pieces, *why, PATH)
    assert sharing.told() == [[saved_to("there"), *([finish] if rank == WRITER else [])] for rank in range(2)]
    told = error or Answer(1, {"size_bytes": 2})
    assert sharing.says(WRITER, told) == [told]
    assert sharing.told() == [[] if error else [ForgetCheckpoint(PATH)]] * 2
    assert sharing.group.work.awaited == {}


def test_a_model_that_is_divided_goes_on_when_all_have_a_copy_and_what_all_have_one_alone_saves(
    sharing: Spoken,
) -> None:
    """Also if some have written theirs already.

    Nothing behind a save that one cannot copy begins before it has failed. LoRA all have.
    """
    sharing.group.send(saved_to("there"))
    assert sharing.says(0, Copied(1), PARTS[0]) == []
    assert sharing.says(1, Copied(1)) == [Copied(1)]
    sharing.told()
    assert sharing.ask(saved_to("there"), {rank: Answer(1, {"rank": rank}) for rank in range(2)}) == [
        Answer(1, {"rank": WRITER})
    ]
    assert sharing.told() == [[saved_to("there"), ForgetCheckpoint(PATH)]] * 2


@pytest.mark.parametrize("call", [CREATE, LOAD])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_one_worker_cannot_make_is_deleted_on_all(
    pair: Spoken, call: CreateModel | LoadModel, rank: int
) -> None:
    number = call.number
    assert pair.ask(call, {1 - rank: Answer(number, {}), rank: failed(number, rank)}) == [failed(number, rank)]
    assert pair.told() == [[call, DeleteModel("tiny", MODEL)]] * 2
    assert (pair.group.ended(), pair.group.work.loaded) == (None, set())


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (STEP, "model b is not the same on all workers any more"),
        (LOAD, "model b is not the same on all workers any more"),
        (TakeSnapshot(1, "tiny", MODEL, "b/1", True), "samples of model b would follow different weights"),
    ],
)
def test_a_model_that_is_not_the_same_on_all_ends_the_group(pair: Spoken, call: Any, why: str) -> None:
    """One alone refuses a step, cannot load weights into an existing model, or lacks inflight weights."""
    assert len(pair.ask(CREATE, {rank: Answer(11, {}) for rank in range(2)})) == 1
    assert pair.ask(call, {0: Answer(call.number, {}), 1: failed(call.number, 1)}) == []
    assert pair.group.ended() == f"worker 1 of 2: ({why}: worker 1 cannot)"
    assert {worker.state for worker in pair.workers} == {"down"}
    assert (pair.group.work.awaited, pair.group.work.loaded) == ({}, set())


# ---- Forward work


def asked_to_prepare(number: int = 1) -> Prepare:
    return Prepare(number, f"m/{number}", "m", "tiny", [], b"")


def prepared(rank: int, together: list[int], number: int = 1) -> Prepared:
    """What a worker says of two datums: each has an image that all have to decode, and one that it alone has not."""
    pixels = [{f"{index}": 5, f"{index} of {rank}": 3} for index in range(2)]
    return Prepared(number, f"m/{number}", True, [3, 5], pixels, together)


def test_an_operation_is_prepared_when_all_hold_it_and_dropped_if_one_cannot(pair: Spoken) -> None:
    """What is too long for one is computed by all."""
    pixels = [{"0": 5, "0 of 0": 3, "0 of 1": 3}, {"1": 5, "1 of 0": 3, "1 of 1": 3}]
    expected = Prepared(1, "m/1", True, [3, 5], pixels, [0])
    assert pair.ask(asked_to_prepare(), {0: prepared(0, []), 1: prepared(1, [0])}) == [expected]
    assert pair.told() == [[asked_to_prepare()]] * 2
    refused = PrepareFailed(1, "m/1", True, "StoreUnavailableError", "worker 1 cannot")
    assert pair.ask(asked_to_prepare(), {1: refused, 0: prepared(0, [])}) == [refused]
    assert pair.told() == [[asked_to_prepare(), Drop(["m/1"])], [asked_to_prepare()]]


def computed(rank: int, asked: RunPass, tokens: int = 100) -> PassDone:
    """What a worker says of a pass: its rank is the loss of each datum, and the negative length its log-probability."""
    losses, logprobs = np.full(len(asked.pieces), float(rank)), -np.array(asked.lengths, np.float32)
    results = [(*piece, [1]) for piece in asked.pieces]
    return PassDone(asked.number, results, [], tokens, [[] for _ in results], [], losses.tobytes() + logprobs.tobytes())


def refused(rank: int, asked: RunPass) -> PassDone:
    """What a worker says of a pass of which it can compute nothing."""
    return PassDone(
        asked.number, [], [(*piece, "UserError", f"worker {rank} cannot") for piece in asked.pieces], 100, [], [], b""
    )


def shares_of(spoken: Spoken, asked: RunPass) -> list[Any]:
    """What each worker is told of a pass; None if it is told nothing."""
    spoken.group.send(asked)
    return [of_worker[0] if of_worker else None for of_worker in spoken.told()]


def test_a_pass_is_computed_by_all_and_told_as_one(pair: Spoken) -> None:
    """Of a share that fails the others keep their results, and who has none is not waited for."""
    pieces = [("m/1", 0), ("m/1", 1), ("n/1", 0), ("n/1", 1)]
    first, second = shares_of(pair, RunPass(1, "tiny", True, pieces, [9, 2, 3, 4]))
    assert (first.pieces, second.pieces) == (pieces[:1], pieces[1:])
    assert [each["pass_tokens"] for each in pair.group.status.workers] == [9, 9]
    assert pair.says(1, computed(1, second)) == []
    (done,) = pair.says(0, computed(0, first))
    assert (done.number, done.results, done.failures, done.metrics) == (
        1,
        [(*piece, [1]) for piece in pieces],
        [],
        [[]] * 4,
    )
    assert np.frombuffer(done.payload[:32], np.float64).tolist() == [0.0, 1.0, 1.0, 1.0]
    assert np.frombuffer(done.payload[32:], np.float32).tolist() == [-9.0, -2.0, -3.0, -4.0]
    assert (done.tokens_per_pass, pair.group.work.awaited) == (200, {})
    first, second = shares_of(pair, RunPass(2, "tiny", False, pieces[1:3], [9, 2]))
    pair.says(0, computed(0, first))
    (done,) = pair.says(1, refused(1, second))
    assert (done.results, done.failures) == ([("m/1", 1, [1])], [("n/1", 0, "UserError", "worker 1 cannot")])
    first, second = shares_of(pair, RunPass(3, "tiny", True, pieces[:1], [9]))
    assert second is None
    assert [len(pair.says(0, computed(0, first))), *(each["pass_tokens"] for each in pair.group.status.workers)] == [
        1,
        27,
        11,
    ]


TOGETHER = RunPass(1, "tiny", True, [("m/1", 0)], [9], together=True)


def test_a_sequence_of_all_workers_is_given_to_all_and_told_once(pair: Spoken) -> None:
    """With the numbers of the first: each has all of them."""
    (done,) = pair.ask(TOGETHER, {1: computed(1, TOGETHER, tokens=10), 0: computed(0, TOGETHER)})
    assert pair.told() == [[TOGETHER], [TOGETHER]]
    assert [each["pass_tokens"] for each in pair.group.status.workers] == [4, 4]
    assert (done.results, done.failures, done.tokens_per_pass) == ([("m/1", 0, [1])], [], 20)
    assert np.frombuffer(done.payload[:8], np.float64).tolist() == [0.0]
    (done,) = pair.ask(TOGETHER, {rank: refused(rank, TOGETHER) for rank in range(2)})
    assert done.failures == [("m/1", 0, "UserError", "worker 0 cannot")]
    assert pair.group.work.awaited == {}


def test_a_sequence_that_only_some_have_computed_ends_all(pair: Spoken) -> None:
    """The others have gradients of their slices, which are no step's."""
    for rank in (0, 1):
        assert pair.ask(TOGETHER, {rank: refused(rank, TOGETHER), 1 - rank: computed(1 - rank, TOGETHER)}) == []
        why = "the gradients of m/1 are not those of one sequence: not all workers have computed it"
        assert pair.group.ended() == f"worker 1 of 2: ({why})"
        pair.start()


def test_passes_follow_the_memory_of_the_worker_that_has_least_and_of_their_own_base_model(pair: Spoken) -> None:
    def tokens_per_pass(base_model: str, datums: int, tokens: list[int]) -> int:
        asked = RunPass(1, base_model, True, [("m/1", index) for index in range(datums)], [5] * datums)
        said: list[Any] = []
        for rank, share in enumerate(shares_of(pair, asked)):
            said += [] if share is None else pair.says(rank, computed(rank, share, tokens[rank]))
        (done,) = said
        return int(done.tokens_per_pass)

    assert [tokens_per_pass("less", datums, [100, 10]) for datums in (2, 1)] == [20, 20]
    # A pass on another base model has the first worker's memory of its own: what `less` had to learn on the second is
    # no limit here.
    assert [tokens_per_pass("tiny", datums, [100, 100]) for datums in (2, 1)] == [200, 200]
    assert tokens_per_pass("less", 1, [100, 100]) == 20


# ---- Samples


def sample(number: int) -> Sample:
    body = b'{"prompt":{"chunks":[{"tokens":[1]}]},"sampling_params":{"max_tokens":9}}'
    return Sample(f"s:sample:0/{number}", 1, "tiny", None, 1, False, body)


def loads(spoken: Spoken) -> list[float]:
    """What workers have to sample."""
    return [worker.load for worker in spoken.group.work.routing.workers]


def test_samples_are_spread_cancelled_where_they_run_and_leave_their_worker_free(pair: Spoken) -> None:
    for number in range(6):
        pair.group.send(sample(number))
    names = [[message.request_id for message in told] for told in pair.told()]
    assert [len(of_worker) for of_worker in names] == [3, 3]
    for number in range(6):
        for run in (1, 1, 2):  # once more, when it is not there any more, and a run that never was
            pair.group.send(CancelSample(f"s:sample:0/{number}", run))
    assert pair.told() == [[CancelSample(name, 1) for name in of_worker] for of_worker in names]
    assert loads(pair) == [0, 0]
    for number in range(4):
        done = SampleDone(f"s:sample:0/{number}", 1, b"")
        assert pair.ask(sample(number), {0: done}) == [done]
        assert pair.told() == [[sample(number)], []]  # the first is free again each time
    pair.group.send(sample(7))
    pair.group.send(EndSession("s", False))
    assert (pair.group.work.routing.running, loads(pair)) == ({}, [0, 0])


def test_a_sample_whose_weights_a_worker_has_dropped_goes_to_another(pair: Spoken) -> None:
    """Each drops snapshots that it has not sampled for long. It fails when none has them."""
    gone = SampleFailed("s:sample:0/1", 1, "worker 1 cannot", "user", gone=True)
    for answer in (SampleDone("s:sample:0/1", 1, b""), gone):
        assert pair.ask(sample(1), {0: gone}) == []
        assert pair.told() == [[sample(1)], [sample(1)]]
        assert pair.says(1, answer) == [answer]
    assert (pair.group.work.routing.running, loads(pair)) == ({}, [0, 0])


@pytest.mark.parametrize(
    ("sampler", "shard", "helps"), [("vllm", "none", False), ("none", "weights", False), ("vllm", "weights", True)]
)
def test_the_worker_that_samples_takes_snapshots_and_the_others_help_where_weights_are_divided(
    speak: Callable[..., Spoken], sampler: str, shard: str, helps: bool
) -> None:
    """Where nothing samples divided weights the first refuses: one that helped would wait for it.

    Nobody follows other weights than it.
    """
    spoken = speak(2, sampler, shard).start()
    snapshot = TakeSnapshot(1, "tiny", MODEL, "b/1", False)
    for number in range(3):
        spoken.group.send(sample(number))
    answers = {rank: Answer(1, {"rank": rank}) for rank in range(2 if helps else 1)}
    assert spoken.ask(snapshot, answers) == [answers[0]]
    assert spoken.told() == [[*map(sample, range(3)), snapshot], [snapshot] if helps else []]
    for failing, inflight in product(([0], [1], [0, 1]), (False, True)) if helps else ():
        replies = {rank: failed(1, rank) if rank in failing else answers[rank] for rank in range(2)}
        assert spoken.ask(replace(snapshot, inflight=inflight), replies) == [failed(1, failing[0])]
    assert spoken.group.ended() is None


# ---- Ended


def test_what_all_had_answered_before_one_ended_is_told_and_nothing_else_is(pair: Spoken) -> None:
    for number in (21, 22, 23):
        pair.group.send(OptimStep(number, "tiny", MODEL, {}))
    pair.workers[0].last_messages = [Answer(number, {"rank": 0}) for number in (21, 22, 23)]
    pair.workers[1].last_messages = [Answer(number, {"rank": 1}) for number in (21, 22)]
    pair.workers[1].end = KILLED
    assert pair.group.ended() == f"worker 1 of 2: {KILLED}"
    assert pair.group.last_messages == [Answer(number, {"rank": WRITER}) for number in (21, 22)]


def test_a_worker_that_ends_because_another_did_is_named_only_if_no_other_has_ended(pair: Spoken) -> None:
    """Between CPUs the others see an end at once and end too: the engine may see both together, or the cause last."""
    first, second = pair.workers
    first.follows = True
    for end in (KILLED, None):
        first.end, second.end = "the others are gone", end
        assert pair.group.ended() == (f"worker 1 of 2: {KILLED}" if end else "worker 0 of 2: the others are gone")
        pair.start()


HUNG_S = max(ServerConfig().worker_hung_s, ServerConfig().worker_stuck_s) + 1


def signs_of(still_s: float, waits: bool, is_ready: bool) -> Liveness:
    """Of a worker in which nothing has moved for so long, maybe while it waits for others."""
    liveness = Liveness(ServerConfig())
    liveness.is_ready = is_ready
    for _ in range(SETTLED):
        liveness.beat(Alive(still_s, still_s, still_s, waits))
    return liveness


def test_what_one_told_before_another_became_ready_does_not_end_it() -> None:
    """All leave their meeting at once and say so in turn: the last one's last heartbeat is still of the meeting."""
    ready, starting = signs_of(0.0, waits=False, is_ready=True), signs_of(HUNG_S, waits=True, is_ready=False)
    starting.another_went_on()
    for beats in range(1, SETTLED + 1):
        starting.beat(Alive(HUNG_S, HUNG_S, HUNG_S, True))
        assert (hanging([ready, starting]) == [starting]) == (beats == SETTLED)
    starting.beat(Alive(HUNG_S, 0.5, 0.5, True))
    assert not hanging([ready, starting])


@pytest.mark.parametrize("is_ready", [True, False])
def test_of_workers_that_wait_for_each_other_the_one_that_hangs_is_named_or_all(is_ready: bool) -> None:
    """One that starts may be in one call for long if nobody waits for it: it may download its model."""
    waiting = [signs_of(HUNG_S, waits=True, is_ready=is_ready) for _ in range(2)]
    hung, moving = signs_of(HUNG_S, waits=False, is_ready=is_ready), signs_of(0.5, waits=False, is_ready=is_ready)
    assert hanging([*waiting, hung]) == [hung]
    assert hanging(waiting) == waiting
    assert hanging([*waiting, moving]) == hanging([hung]) == ()
    assert [bool(each.fault) for each in (hung, moving, *waiting)] == [is_ready, False, False, False]


# ---- With processes


class WatchedGroup(Watched):
    """A group of real processes that exchange over gloo, with what it said and why it ended."""

    def __init__(self, link: ChildLink, data_dir: Path, how: str) -> None:
        super().__init__(link, "ready")
        config = Config(["tiny=unused"], str(data_dir), server=ServerConfig(worker_still_s=8.0))
        self.group = WorkerGroup(config, link, 2, (sys.executable, "-m", "tests.engine.exchanging_worker", how))
        self.process = self.group  # type: ignore[assignment]  # it does for all what a worker's does for one
        self.patience_s = 5 * LONG_S  # they import torch


@pytest.mark.parametrize(
    ("how", "named", "why"),
    [("behind", "1", ""), ("apart", r"\d", "all wait for each other in an exchange, and nothing comes: ")],
)
def test_a_worker_for_which_others_wait_in_an_exchange_is_named_and_all_are_if_each_waits(
    tmp_path: Path, how: str, named: str, why: str
) -> None:
    """All send heartbeats, and none uses its processor.

    Each waits where the network between them is lost and that to the engine is not.
    """
    with link_of_an_engine() as (_, link):
        watched = WatchedGroup(link, tmp_path, how)
        try:
            watched.group.start_if_due()
            watched.until(lambda: watched.group.is_ready)
            for worker in watched.group.workers:
                worker.send(ForgetCheckpoint("now"))
            watched.until(lambda: watched.ends)
            assert {worker.pid for worker in watched.group.workers} == {None}
        finally:
            watched.group.stop(0.0)
    why += r"it had made no progress in its work for \d+ s \(worker_still_s\) and was killed"
    assert re.fullmatch(rf"worker {named} of 2: the worker process ended unexpectedly \({why}\)", watched.ends[0])


# ---- With the engine


def test_the_server_is_told_once_that_workers_are_lost_and_once_that_all_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "FIRST_DELAY_S", 0.0)
    with engine_with("ready", tmp_path, 2) as (server, engine):
        told: list[Message] = []
        expected: list[Message] = [Ready([FACTS.to_dict()])]

        def hear() -> list[int]:
            """Wait until the server was told what is expected; the workers' process ids then."""
            deadline = time.monotonic() + LONG_S
            while len(told) < len(expected):
                assert time.monotonic() < deadline, told
                engine.receive(0.05)
                engine.turn()
                told.extend(message for message in server.receive() if isinstance(message, Ready | Recovering))
            assert told == expected
            return [worker.pid for worker in engine.workers.workers if worker.pid is not None]

        former = hear()
        os.kill(former[1], signal.SIGKILL)
        server.send(sample(1))  # on its way to workers that are no more: it ends nothing
        expected += [Recovering(f"worker 1 of 2: {KILLED}"), Ready([FACTS.to_dict()])]
        assert not {*hear()} & {*former}  # all were started again
        engine.receive(0.05)
        assert hear()
