"""Several workers as one: what is asked of all is answered once, and none goes on without the others."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.exchanging_worker import TURNS
from tests.engine.light_worker import COMPUTES_S, FACTS
from tests.engine.test_worker_process import LONG_S, engine_with, light, link_of_an_engine
from tests.extent import slow
from tinsmith.config import Config, DistributedConfig, SamplingConfig, ServerConfig
from tinsmith.engine import worker_process
from tinsmith.engine.launching import ChildProcesses
from tinsmith.engine.watching import SETTLED, Signs, hanging
from tinsmith.engine.worker_group import LOOK_FOR_HOSTS_S, WorkerGroup
from tinsmith.errors import ConfigError
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import writer_of
from tinsmith.protocol.questions import Answered, FindMeeting, MeetingPort, OpenMeeting
from tinsmith.protocol.serving import Alive, CancelSample, EndSession, ForgetCheckpoint, Ready, Recovering, Sample, SampleDone, SampleFailed
from tinsmith.protocol.work import (
    Answer,
    CallFailed,
    ClearGradients,
    Copied,
    CreateModel,
    DeleteModel,
    Drop,
    ExportModel,
    LoadModel,
    OptimStep,
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


class Hosts(ChildProcesses):
    """Child processes that are said to run on hosts."""

    def __init__(self) -> None:
        self.known: list[str] | None = []

    def hosts(self) -> list[str] | None:
        return self.known


class Watched:
    """A group of light workers, with what it said and why it ended. `turn` is what the engine's loop does with it, but for starting it."""

    def __init__(self, link: ChildLink, data_dir: Path, count: int, how: str, sampler: str, shard: str, **settings: Any) -> None:
        self.link = link
        self.launcher = Hosts()
        server, sampling, distributed = ServerConfig(**settings), SamplingConfig(sampler=sampler), DistributedConfig(count, shard)
        config = Config(["tiny=unused"], str(data_dir), server=server, sampling=sampling, distributed=distributed)
        self.group = WorkerGroup(config, link, count, light(how), self.launcher)
        self.patience_s = LONG_S
        self.messages: list[Message] = []
        self.ends: list[str] = []
        self.numbers = iter(range(1, 1000))
        self.unseen: list[list[tuple[str, str]]] = [[] for _ in range(count)]

    def turn(self) -> None:
        self.link.receive(0.05)
        self.messages += self.group.receive()
        self.group.watch()
        reason = self.group.ended()
        if reason is not None:
            self.messages += self.group.last_messages
            self.ends.append(reason)

    def until(self, seen: Callable[[], object]) -> None:
        deadline = time.perf_counter() + self.patience_s
        while not seen():
            assert time.perf_counter() < deadline, (self.group.shown, self.messages, self.ends)
            self.turn()

    def start(self) -> list[int]:
        """Start all, and wait until they are ready; their process ids."""
        self.until(lambda: self.group.wait_s == 0)
        self.group.start_if_due()
        self.until(lambda: self.group.is_ready)
        self.messages.clear()
        return self.pids

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.group.workers if worker.pid is not None]

    def asked(self) -> dict[int, dict[str, Any]]:
        """What each worker tells of itself. All that they had answered before has arrived then, and is in `messages`."""
        before = len(self.messages)
        self.group.send(ForgetCheckpoint("heard"))
        told: list[Answer] = []

        def all_told() -> bool:
            told[:] = [each for each in self.messages[before:] if isinstance(each, Answer) and "heard" in each.result]
            return len(told) == self.group.count

        self.until(all_told)
        self.messages = [message for message in self.messages if message not in told]
        found = {each.result["rank"]: each.result for each in told}
        for rank, of_worker in found.items():
            self.unseen[rank] += [(kind, name) for kind, name in of_worker["heard"]]
        return found

    def heard(self) -> list[list[tuple[str, str]]]:
        """What each worker was told since the last call: the kinds of messages and what they were about."""
        self.asked()
        heard, self.unseen = self.unseen, [[] for _ in self.unseen]
        return heard

    def said(self) -> list[Message]:
        """All that was told since the last call, once the workers have answered what they can."""
        self.asked()
        said, self.messages = self.messages, []
        return said

    def release(self) -> list[Message]:
        """What is told once the workers have answered what they held back."""
        self.group.send(ForgetCheckpoint("release"))
        return self.said()

    def create(self, model_id: str) -> None:
        self.group.send(CreateModel(next(self.numbers), "tiny", model_id, {}))
        assert [type(message) for message in self.said()] == [Answer]
        self.heard()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Make a group; what is left of it at the end is killed."""
    made: list[Watched] = []
    with link_of_an_engine() as (_, link):

        def make(count: int = 2, how: str = "member", sampler: str = "local", shard: str = "none", **settings: Any) -> Watched:
            made.append(Watched(link, tmp_path / "data", count, how, sampler, shard, **settings))
            return made[-1]

        yield make
        for watched in made:
            watched.group.stop(0.0)


@pytest.fixture
def pair(watch: Callable[..., Watched]) -> Watched:
    """Two workers that are ready."""
    made = watch()
    made.start()
    return made


def results(message: PassDone) -> list[tuple[object, ...]]:
    """Those of a pass. They travel as lists."""
    return [tuple(result) for result in message.results]


def calls(model_id: str) -> list[Any]:
    """A call of each kind that all workers get, with numbers of their own."""
    return [
        CreateModel(11, "tiny", model_id, {}),
        TakeSnapshot(12, "tiny", model_id, f"{model_id}/3", False),
        OptimStep(13, "tiny", model_id, {}),
        LoadModel(14, "tiny", model_id, "tinker://a/weights/b", "dir", True),
    ]


# ---- Started


def test_a_group_is_ready_once_when_its_last_worker_is(watch: Callable[..., Watched], tmp_path: Path) -> None:
    late = tmp_path / "late"
    watched = watch(3, f"member{late}")
    group = watched.group
    assert (group.is_ready, group.was_ever_ready, group.wait_s, group.models) == (False, False, 0.0, {})
    group.start_if_due()
    assert group.wait_s == float("inf")
    watched.until(lambda: group.workers[0].is_ready)
    assert (group.is_ready, watched.messages) == (False, [])
    group.send(CreateModel(1, "tiny", "too early", {}))
    late.touch()
    watched.until(lambda: group.is_ready)
    # All can train what the last can, and sample what the first can.
    facts = ModelFacts(**FACTS.to_dict() | {"max_trained": 22, "max_sampled": 20})
    assert watched.messages == [WorkerReady([facts.to_dict()], "cpu 0")]
    assert (group.models, group.was_ever_ready) == ({"tiny": facts}, True)
    assert [(each["device"], each["state"]) for each in group.shown] == [(f"cpu {rank}", "ready") for rank in range(3)]
    assert watched.heard() == [[], [], []]  # what was sent before they were ready reached none
    assert len(watched.messages) == 1


def test_workers_meet_at_one_place_that_goes_with_them(watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(worker_process, "FIRST_DELAY_S", 0.0)
    watched = watch(2)
    meetings = []
    for _ in range(2):
        watched.start()
        asked = watched.asked()
        (meeting,) = {of_worker["meeting"] for of_worker in asked.values()}
        assert {of_worker["threads"] for of_worker in asked.values()} == {"3"}
        meetings.append(Path(meeting.removeprefix("file://")).parent)
        assert meetings[-1].is_dir()
        os.kill(watched.pids[0], signal.SIGKILL)
        watched.until(lambda: not watched.pids)
        assert not meetings[-1].exists()
    assert meetings[0] != meetings[1]
    alone = watch(1)
    alone.start()
    assert (alone.asked()[0]["meeting"], alone.asked()[0]["threads"]) == ("", None)


def test_workers_on_other_hosts_start_when_these_are_known_and_are_told_of_one_meeting(watch: Callable[..., Watched]) -> None:
    watched = watch(2)
    group = watched.group
    watched.launcher.known = None
    group.start_if_due()
    assert (watched.pids, 0 < group.wait_s <= LOOK_FOR_HOSTS_S) == ([], True)
    watched.launcher.known = ["10.0.0.1", "10.0.0.2"]
    for _ in range(2):
        watched.start()
        asked = watched.asked()
        assert [asked[rank]["meeting"] for rank in range(2)] == ["tcp://10.0.0.1", "tcp://10.0.0.2"]
        first, second = (worker.answers for worker in group.workers)
        assert first is not None
        assert second is not None
        assert second(FindMeeting()) == MeetingPort("", 0)  # that of the workers before is none of theirs
        assert first(OpenMeeting("10.0.0.1", 7)) == Answered()
        assert second(FindMeeting()) == MeetingPort("10.0.0.1", 7)
        os.kill(watched.pids[1], signal.SIGKILL)
        watched.until(lambda: not watched.pids)
        assert watched.ends[-1] == f"worker 1 of 2 on 10.0.0.2: {KILLED}"


def test_each_worker_has_a_gpu_of_its_own_and_the_first_has_the_vllm_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with link_of_an_engine() as (_, link):

        def made(sampler: str, count: int = 2) -> list[tuple[str, str]]:
            group = WorkerGroup(Config(["tiny=unused"], sampling=SamplingConfig(sampler=sampler)), link, count)
            assert [worker.config.distributed.workers for worker in group.workers] == [count] * count  # the first places vLLM behind them
            return [(worker.config.models.device, worker.config.sampling.sampler) for worker in group.workers]

        assert made("local") == [("cuda:0", "local"), ("cuda:1", "local")]
        assert made("vllm") == [("cuda:0", "vllm"), ("cuda:1", "none")]
        assert made("vllm", 1) == [("auto", "vllm")]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert made("local") == [("cpu", "local"), ("cpu", "local")]


# ---- Asked


def test_what_all_are_asked_for_is_answered_once_and_after_the_last(pair: Watched) -> None:
    for rank in range(2):
        for call in calls(f"hold@{rank}"):
            pair.group.send(call)
        assert pair.heard() == [[(type(call).__name__, f"hold@{rank}") for call in calls("")]] * 2
        assert pair.said() == []
        assert pair.release() == [Answer(number, {"rank": 0}) for number in (11, 12, 13, 14)]
    assert pair.group._awaited == {}


def test_what_fails_on_all_is_a_failure_like_that_of_one_worker(pair: Watched) -> None:
    for call in calls("fail@0 fail@1"):
        pair.group.send(call)
    assert pair.said() == [CallFailed(number, "TinsmithError", "worker 0 cannot") for number in (11, 12, 13, 14)]
    assert [kind for kind, _ in pair.heard()[0] if kind == "DeleteModel"] == []
    assert pair.group._awaited == {}


def test_what_one_worker_does_for_all_is_answered_by_that_one(pair: Watched) -> None:
    """Different models have different workers, the same model always the same."""
    names = [f"model {number}" for number in range(16)]
    checkpoint = {"tinker_path": "tinker://a/weights/b"}
    for name in names:
        pair.group.send(SaveModel(next(pair.numbers), "tiny", name, True, checkpoint))
        pair.group.send(ExportModel(next(pair.numbers), "tiny", name, [], checkpoint))
    assert len(pair.said()) == 32
    saved = [[name for kind, name in of_worker if kind == "SaveModel"] for of_worker in pair.heard()]
    assert sorted(saved[0] + saved[1]) == sorted(names)
    assert all(saved)
    for name in names:
        pair.group.send(SaveModel(next(pair.numbers), "tiny", name, True, checkpoint))
    assert [[name for kind, name in of_worker if kind == "SaveModel"] for of_worker in pair.heard()] == saved


@pytest.mark.parametrize("call", [SaveModel, ExportModel])
def test_a_checkpoint_that_one_worker_has_written_is_looked_up_again_by_all(pair: Watched, call: type[Any]) -> None:
    """One of its path may have been there before, and been sampled."""
    path = "tinker://a/weights/b"
    for number, mark in enumerate(("", " fail@0 fail@1")):
        options = (True,) if call is SaveModel else ([],)
        pair.group.send(call(number + 1, "tiny", f"m{mark}", *options, {"tinker_path": path}))
        assert len(pair.said()) == 1
        forgotten = [[name for kind, name in of_worker if kind == "ForgetCheckpoint"] for of_worker in pair.heard()]
        assert forgotten == ([[], []] if mark else [[path], [path]])
    assert pair.group._awaited == {}


@pytest.fixture
def sharing(watch: Callable[..., Watched]) -> Watched:
    """Two workers that share the weights."""
    watched = watch(sampler="none", shard="weights")
    watched.start()
    return watched


def saved_to(model_id: str, directory: str) -> SaveModel:
    """A save."""
    return SaveModel(1, "tiny", model_id, True, {"tinker_path": "tinker://a/weights/b", "directory": directory})


def came_to(watched: Watched) -> list[Message]:
    """What is told when nothing is awaited any more."""
    watched.until(lambda: not watched.group._awaited)
    return watched.said()


@pytest.mark.parametrize("last", [0, 1])
def test_a_save_of_all_is_finished_by_one_when_all_have_written(sharing: Watched, last: int) -> None:
    save = saved_to(f"part hold@{last}", "there")
    sharing.group.send(save)
    assert sharing.said() == []
    assert sharing.heard() == [[("SaveModel", save.model_id)]] * 2
    sharing.group.send(ForgetCheckpoint("release"))
    assert came_to(sharing) == [Answer(1, {"pieces": [["a", 0, 1, 0], ["a", 1, 1, 0]]})]
    writes = [rank == writer_of(save.model_id, 2) for rank in range(2)]
    forgotten = ("ForgetCheckpoint", save.checkpoint["tinker_path"])  # by all: any of them may have sampled one of this path before
    assert sharing.heard() == [[("FinishSave", "there"), forgotten] if writer else [forgotten] for writer in writes]


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("marks", ["part fail@0", "part fail@1", "part fail@0 fail@1", "whole fail@0", "fail@0 fail@1"])
def test_a_save_that_one_fails_at_is_deleted_by_one_when_nobody_writes_any_more(sharing: Watched, last: int, marks: str) -> None:
    save = saved_to(f"{marks} hold@{last}", "there")
    sharing.group.send(save)
    assert sharing.said() == []
    assert sharing.heard() == [[("SaveModel", save.model_id)]] * 2
    sharing.group.send(ForgetCheckpoint("release"))
    assert came_to(sharing) == [CallFailed(1, "TinsmithError", f"worker {0 if 'fail@0' in marks else 1} cannot")]
    writes = [rank == writer_of(save.model_id, 2) for rank in range(2)]
    assert sharing.heard() == [[("FinishSave", "there")] if writer else [] for writer in writes]


@pytest.mark.parametrize("marks", ["part copy@0 copy@1 hold@0 hold@1", "part copy@0 copy@1 hold@1"])
def test_the_copy_of_a_model_that_is_divided_is_told_when_all_have_theirs(sharing: Watched, marks: str) -> None:
    """Also if some have written it already."""
    sharing.group.send(saved_to(marks, "there"))
    assert sharing.said() == [Copied(1)]
    assert [type(message) for message in sharing.release()] in ([], [Answer])
    assert [type(message) for message in came_to(sharing)] in ([], [Answer])


def test_the_copy_of_a_model_that_one_cannot_copy_is_never_told(sharing: Watched) -> None:
    """Nothing behind the save begins before it has failed."""
    sharing.group.send(saved_to("part copy@0 fail@1", "there"))
    assert came_to(sharing) == [CallFailed(1, "TinsmithError", "worker 1 cannot")]


def test_the_copy_that_one_worker_takes_for_all_is_told_at_once(pair: Watched) -> None:
    save = saved_to("copy@0 copy@1 hold@0 hold@1", "there")
    pair.group.send(save)
    assert pair.said() == [Copied(1)]
    assert pair.release() == [Answer(1, {"rank": writer_of(save.model_id, 2)})]


def test_what_one_alone_saves_while_others_share_the_weights_is_answered_by_that_one(sharing: Watched) -> None:
    """As of LoRA, which all have."""
    save = saved_to("adapter", "there")
    sharing.group.send(save)
    assert came_to(sharing) == [Answer(1, {"rank": writer_of(save.model_id, 2)})]
    assert [kind for of_worker in sharing.heard() for kind, _ in of_worker] == ["SaveModel", "ForgetCheckpoint"] * 2


@pytest.mark.parametrize(("model_id", "directory"), [("part hold@1", "left"), ("part hold@0 hold@1", "left"), ("part", "hold@0 hold@1")])
def test_what_is_left_of_a_save_that_ended_with_the_workers_is_deleted_by_the_next(
    watch: Callable[..., Watched], model_id: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While parts are written, or a checkpoint is made of them."""
    monkeypatch.setattr(worker_process, "FIRST_DELAY_S", 0.0)
    watched = watch(sampler="none", shard="weights")
    pids = watched.start()
    watched.group.send(saved_to(model_id, directory))
    watched.heard()
    if model_id == "part":
        watched.until(lambda: "FinishSave" in {kind for of_worker in watched.heard() for kind, _ in of_worker})
    os.kill(pids[1], signal.SIGKILL)
    watched.until(lambda: watched.ends)
    assert watched.group._awaited == {}
    for dropped in ([("DropFiles", directory)], []):
        watched.start()
        assert watched.heard() == [dropped, []]
        watched.group.workers[0].kill()
        watched.until(lambda: not watched.pids)


def test_orders_reach_all(pair: Watched) -> None:
    pair.group.send(ClearGradients("tiny", "a"))
    pair.group.send(DeleteModel("tiny", "a"))
    pair.group.send(Drop(["a/1", "a/2"]))
    pair.group.send(EndSession("s", False))
    orders = [("ClearGradients", "a"), ("DeleteModel", "a"), ("Drop", "a/1 a/2"), ("EndSession", "s")]
    assert pair.heard() == [orders, orders]


def test_a_model_that_one_worker_cannot_make_is_deleted_on_all(pair: Watched) -> None:
    load = LoadModel(2, "tiny", "from fail@0", "tinker://a/weights/b", "dir", True)
    pair.heard()
    for call, name, reason in ((CreateModel(1, "tiny", "fail@1", {}), "fail@1", 1), (load, "from fail@0", 0)):
        pair.group.send(call)
        assert pair.said() == [CallFailed(call.number, "TinsmithError", f"worker {reason} cannot")]
        heard = [(type(call).__name__, name), ("DeleteModel", name)]
        assert pair.heard() == [heard, heard]
    assert (pair.ends, pair.group._loaded) == ([], set())


@pytest.mark.parametrize("call", [2, 3])
def test_a_model_that_is_not_the_same_on_all_ends_the_group(pair: Watched, call: int) -> None:
    """A step that one alone refuses, or weights that it alone cannot load into a model that is there."""
    pair.group.send(CreateModel(1, "tiny", "m fail@1", {}))
    pair.group._loaded.add("m fail@1")  # as if it had been made, and failed only later
    pair.said()
    pair.group.send(calls("m fail@1")[call])
    pair.until(lambda: pair.ends)
    why = "model m fail@1 is not the same on all workers any more: worker 1 cannot"
    assert pair.ends == [f"worker 1 of 2: the worker process ended unexpectedly ({why})"]
    assert [message for message in pair.messages if isinstance(message, Answer | CallFailed)] == []
    assert (pair.pids, pair.group._awaited, pair.group._loaded) == ([], {}, set())


# ---- Forward work


def test_an_operation_is_prepared_when_all_hold_it(pair: Watched) -> None:
    pair.group.send(Prepare(1, "m/hold@1", "m", "tiny", [], b"3 5"))
    assert pair.said() == []
    pixels = [{"0": 5, "0 of 0": 3, "0 of 1": 3}, {"1": 5, "1 of 0": 3, "1 of 1": 3}]
    assert pair.release() == [Prepared(1, "m/hold@1", True, [3, 5], pixels)]
    assert pair.group._awaited == {}


def test_an_operation_that_one_worker_cannot_prepare_is_dropped_by_the_others(pair: Watched) -> None:
    pair.group.send(Prepare(1, "m/fail@1", "m", "tiny", [], b"3 5"))
    assert pair.said() == [PrepareFailed(1, "m/fail@1", True, "StoreUnavailableError", "worker 1 cannot")]
    asked = [("Prepare", "m/fail@1")]
    assert pair.heard() == [[*asked, ("Drop", "m/fail@1")], asked]


def test_an_operation_that_is_dropped_while_it_is_prepared_is_not_awaited_any_more(pair: Watched) -> None:
    pair.group.send(Prepare(1, "m/1 hold@1", "m", "tiny", [], b"3"))
    pair.group.send(Prepare(2, "m/2 hold@1", "m", "tiny", [], b"3"))
    assert pair.said() == []
    pair.group.send(Drop(["m/1 hold@1"]))
    assert list(pair.group._awaited) == [2]
    assert [message.number for message in pair.release() if isinstance(message, Prepared)] == [2]
    assert pair.group._awaited == {}


def test_a_pass_is_computed_by_all_and_told_as_one(pair: Watched) -> None:
    pieces = [("m/hold@1", 0), ("m/hold@1", 1), ("n/1", 0), ("n/1", 1)]
    pair.group.send(RunPass(1, "tiny", True, pieces, [9, 2, 3, 4]))
    assert pair.said() == []
    first, second = pair.heard()
    assert (first, second) == ([("RunPass", "m/hold@1/0")], [("RunPass", "m/hold@1/1 n/1/0 n/1/1")])
    assert [each["pass_tokens"] for each in pair.group.shown] == [9, 9]
    (done,) = pair.release()
    assert isinstance(done, PassDone)
    assert (done.number, results(done), done.failures, done.metrics) == (1, [(*piece, [1]) for piece in pieces], [], [[]] * 4)
    assert np.frombuffer(done.payload[:32], np.float64).tolist() == [0.0, 101.0, 100.0, 101.0]
    assert np.frombuffer(done.payload[32:], np.float32).tolist() == [-9.0, -2.0, -3.0, -4.0]
    assert done.tokens_per_pass == 200
    assert pair.group._awaited == {}


def test_a_worker_without_a_share_of_a_pass_is_not_waited_for(pair: Watched) -> None:
    pair.group.send(RunPass(1, "tiny", True, [("hold@1", 0)], [9]))
    (done,) = pair.said()
    assert isinstance(done, PassDone)
    assert results(done) == [("hold@1", 0, [1])]
    assert pair.heard() == [[("RunPass", "hold@1/0")], []]
    assert [each["pass_tokens"] for each in pair.group.shown] == [9, 0]


def test_a_share_that_fails_leaves_the_others_their_results(pair: Watched) -> None:
    pair.group.send(RunPass(1, "tiny", False, [("m/1", 0), ("fail@1", 0)], [9, 2]))
    (done,) = pair.said()
    assert isinstance(done, PassDone)
    assert results(done) == [("m/1", 0, [1])]
    assert [tuple(failure) for failure in done.failures] == [("fail@1", 0, "UserError", "worker 1 cannot")]


def test_a_sequence_of_all_workers_is_given_to_all_and_told_once(pair: Watched) -> None:
    """With the numbers of the first: each has all of them."""
    pair.group.send(RunPass(1, "less@1", True, [("m/hold@1", 0)], [9], together=True))
    assert pair.said() == []
    assert pair.heard() == [[("RunPass", "m/hold@1/0")], [("RunPass", "m/hold@1/0")]]
    assert [each["pass_tokens"] for each in pair.group.shown] == [4, 4]
    (done,) = pair.release()
    assert isinstance(done, PassDone)
    assert (done.number, results(done), done.failures) == (1, [("m/hold@1", 0, [1])], [])
    assert np.frombuffer(done.payload[:8], np.float64).tolist() == [0.0]
    assert done.tokens_per_pass == 20
    assert pair.group._awaited == {}
    pair.group.send(RunPass(2, "tiny", True, [("fail@0 fail@1", 0)], [9], together=True))
    (done,) = pair.said()
    assert isinstance(done, PassDone)
    assert [tuple(failure) for failure in done.failures] == [("fail@0 fail@1", 0, "UserError", "worker 0 cannot")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sequence_that_only_some_have_computed_ends_all(pair: Watched, rank: int) -> None:
    """The others have gradients of their slices, which are no step's."""
    pair.group.send(RunPass(1, "tiny", True, [(f"m/fail@{rank}", 0)], [9], together=True))
    pair.until(lambda: pair.ends)
    assert f"the gradients of m/fail@{rank} are not those of one sequence: not all workers have computed it" in pair.ends[0]
    assert not any(isinstance(message, PassDone) for message in pair.messages)


def test_what_is_too_long_for_one_is_computed_by_all(pair: Watched) -> None:
    pair.group.send(Prepare(1, "m/long@1", "m", "tiny", [], b"30 5"))
    (prepared,) = pair.said()
    assert isinstance(prepared, Prepared)
    assert prepared.together == [0]


def test_passes_follow_the_memory_of_the_worker_that_has_least_and_of_their_own_base_model(pair: Watched) -> None:
    def tokens_per_pass(base_model: str, datums: int) -> int:
        pair.group.send(RunPass(next(pair.numbers), base_model, True, [("m/1", index) for index in range(datums)], [5] * datums))
        (done,) = pair.said()
        assert isinstance(done, PassDone)
        return done.tokens_per_pass

    assert [tokens_per_pass("less@1", datums) for datums in (2, 1)] == [20, 20]
    # A pass on another base model has the first worker's memory of its own: what `less@1` had to learn on the second is no limit here.
    assert [tokens_per_pass("tiny", datums) for datums in (2, 1)] == [200, 200]
    assert tokens_per_pass("less@1", 1) == 20


# ---- Samples


def sample(number: int, mark: str = "") -> Sample:
    return Sample(
        f"s:sample:0/{number}{mark}",
        1,
        "tiny",
        None,
        1,
        False,
        b'{"prompt":{"chunks":[{"tokens":[1]}]},"sampling_params":{"max_tokens":9}}',
    )


def test_samples_are_spread_and_cancelled_where_they_run(pair: Watched) -> None:
    for number in range(6):
        pair.group.send(sample(number))
    samples = [[name for _, name in of_worker] for of_worker in pair.heard()]
    assert [len(of_worker) for of_worker in samples] == [3, 3]
    for number in range(6):
        pair.group.send(CancelSample(f"s:sample:0/{number}", 1))
        pair.group.send(CancelSample(f"s:sample:0/{number}", 1))  # it is not there any more
        pair.group.send(CancelSample(f"s:sample:0/{number}", 2))  # this run never was
    assert pair.heard() == [[("CancelSample", name) for name in of_worker] for of_worker in samples]
    assert [worker.load for worker in pair.group._routing.workers] == [0, 0]


def test_samples_that_have_ended_leave_their_worker_free(pair: Watched) -> None:
    done = [sample(number, " done@0 done@1") for number in range(4)]
    for message in done:
        pair.group.send(message)
        (answer,) = pair.said()
        assert answer == SampleDone(message.request_id, 1, b"0")  # the first is free again each time
    pair.group.send(sample(7))
    pair.group.send(EndSession("s", False))
    assert (pair.group._routing.running, pair.group._routing.workers[0].load) == ({}, 0)


def test_a_sample_whose_weights_a_worker_has_dropped_goes_to_another(pair: Watched) -> None:
    """Each drops snapshots that it has not sampled for long. It fails when none has them."""
    pair.group.send(sample(1, " gone@0 done@1"))
    (answer,) = [*pair.said(), *pair.said()]  # of one worker, then of the other
    assert answer == SampleDone("s:sample:0/1 gone@0 done@1", 1, b"1")
    pair.group.send(sample(2, " gone@0 gone@1"))
    (failed,) = [*pair.said(), *pair.said()]
    assert failed == SampleFailed("s:sample:0/2 gone@0 gone@1", 1, "worker 1 cannot", "user", gone=True)
    assert pair.heard() == [[("Sample", "s:sample:0/1 gone@0 done@1"), ("Sample", "s:sample:0/2 gone@0 gone@1")]] * 2
    assert (pair.group._routing.running, [worker.load for worker in pair.group._routing.workers]) == ({}, [0, 0])


def test_only_the_worker_of_vllm_servers_samples(watch: Callable[..., Watched]) -> None:
    watched = watch(2, sampler="vllm")
    watched.start()
    for number in range(3):
        watched.group.send(sample(number))
    watched.group.send(TakeSnapshot(1, "tiny", "m", "m/1", False))
    assert watched.said() == [Answer(1, {"rank": 0})]
    first, second = watched.heard()
    assert ([kind for kind, _ in first], second) == ([*["Sample"] * 3, "TakeSnapshot"], [])


@pytest.mark.parametrize("inflight", [False, True])
def test_a_snapshot_of_weights_that_are_divided_is_taken_by_all(watch: Callable[..., Watched], inflight: bool) -> None:
    """The first has it, and answers. One that fails is a failure, and nobody follows other weights than the first, so that all go on."""
    watched = watch(2, sampler="vllm", shard="weights")
    watched.start()
    watched.group.send(sample(1))
    for number, mark in enumerate(("", "fail@1", "fail@0", "fail@0 fail@1"), 1):
        watched.group.send(TakeSnapshot(number, "tiny", f"m {mark}", f"m {mark}/1", inflight))
    failures = [CallFailed(number, "TinsmithError", f"worker {rank} cannot") for number, rank in ((2, 1), (3, 0), (4, 0))]
    assert watched.said() == [Answer(1, {"rank": 0}), *failures]
    first, second = ([kind for kind, _ in each] for each in watched.heard())
    assert (first, second) == (["Sample", *["TakeSnapshot"] * 4], ["TakeSnapshot"] * 4)
    assert watched.ends == []


def test_where_nothing_samples_divided_weights_no_worker_helps(watch: Callable[..., Watched]) -> None:
    """The first refuses: one that helped would wait for it."""
    watched = watch(2, sampler="none", shard="weights")
    watched.start()
    watched.group.send(TakeSnapshot(1, "tiny", "m", "m/1", False))
    assert watched.said() == [Answer(1, {"rank": 0})]
    assert [len(each) for each in watched.heard()] == [1, 0]


def test_status_is_that_of_all(pair: Watched) -> None:
    pair.group.send(ForgetCheckpoint("status"))
    pair.asked()
    status = pair.group.status
    assert [status.done, status.running_samples, status.waiting_samples, status.finished_samples, status.sampled_tokens] == [
        10 + 20,
        11 + 21,
        12 + 22,
        13 + 23,
        14 + 24,
    ]
    assert (status.memory, pair.group.sampled_tokens) == ({"weights": 14, "0": 1, "1": 1}, 38)


# ---- Ended


def test_a_worker_that_is_killed_ends_the_others_and_all_are_started_again(pair: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "FIRST_DELAY_S", 0.0)
    first = pair.pids
    pair.create("m")
    pair.group.send(sample(1))
    pair.group.send(ForgetCheckpoint("status"))
    pair.group.send(OptimStep(13, "tiny", "hold@1", {}))
    pair.group.send(RunPass(14, "tiny", True, [("m/hold@0", 0), ("m/1", 1)], [3, 2]))
    pair.heard()
    os.kill(first[1], signal.SIGKILL)
    pair.until(lambda: pair.ends)
    assert pair.ends == [f"worker 1 of 2: {KILLED}"]
    assert (pair.messages, pair.pids, [worker.is_ready for worker in pair.group.workers]) == ([], [], [False, False])
    assert (pair.group._awaited, pair.group._loaded, pair.group._routing.running) == ({}, set(), {})
    assert (pair.group.busy_s, pair.group.status.done, pair.group.sampled_tokens) == (0.0, 0, 38)
    second = pair.start()
    assert not {*first} & {*second}
    assert pair.heard() == [[], []]
    pair.create("m")
    assert len(pair.ends) == 1


def test_what_all_had_answered_before_one_ended_is_told_and_nothing_else_is(pair: Watched) -> None:
    pair.create("m")
    pair.group.send(OptimStep(21, "tiny", "m", {}))
    pair.group.send(OptimStep(22, "tiny", "n hold@0", {}))
    pair.group.send(ForgetCheckpoint("release"))
    pair.group.send(OptimStep(23, "tiny", "die@0 die@1", {}))
    for pid in pair.pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is dead, which nobody has noticed yet
    pair.until(lambda: pair.ends)
    assert [message for message in pair.messages if isinstance(message, Answer)] == [Answer(21, {"rank": 0}), Answer(22, {"rank": 1})]
    assert pair.ends == ["worker 0 of 2: the worker process ended unexpectedly (exit code 9)"]


def test_a_worker_that_ends_because_another_did_is_not_the_reason(pair: Watched) -> None:
    """Between CPUs the others learn of an end at once, and end too: the engine may see both at the same time, or the cause last."""
    first, second = pair.pids
    pair.group.send(ForgetCheckpoint("follow"))
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    pair.until(lambda: pair.ends)
    assert pair.ends == [f"worker 1 of 2: {KILLED}"]


def test_a_worker_that_ended_because_of_another_is_named_if_no_other_has_ended(pair: Watched) -> None:
    pair.group.send(ForgetCheckpoint("follow"))
    pair.until(lambda: pair.ends)
    assert pair.ends == ["worker 0 of 2: the worker process ended unexpectedly (the others are gone)"]


def test_a_worker_that_hangs_is_named_and_ends_the_others(watch: Callable[..., Watched]) -> None:
    watched = watch(3, worker_hung_s=4.0)
    os.kill(watched.start()[1], signal.SIGSTOP)
    watched.until(lambda: watched.ends)
    why = "it had shown no sign of life for 4 s (worker_hung_s) and was killed"
    assert watched.ends == [f"worker 1 of 3: the worker process ended unexpectedly ({why})"]
    assert watched.pids == []


def test_a_worker_that_hangs_while_others_wait_for_it_is_named(watch: Callable[..., Watched]) -> None:
    """All send heartbeats, and none uses its processor: those that wait in an exchange are not the reason."""
    watched = watch(2, worker_still_s=4.0)
    watched.start()
    watched.group.send(ForgetCheckpoint("exchange"))
    watched.until(lambda: watched.ends)
    why = r"it had made no progress in its work for \d+ s \(worker_still_s\) and was killed"
    assert re.fullmatch(rf"worker 1 of 2: the worker process ended unexpectedly \({why}\)", watched.ends[0])


STARTS_S = TURNS * COMPUTES_S - 5
"""How long a worker may be without a sign while it starts: longer than its first heartbeat takes on a busy machine."""


def exchanging(watch: Callable[..., Watched], how: str, **settings: float) -> Watched:
    """Three workers that exchange over gloo."""
    watched = watch(3, **settings)
    watched.patience_s = 5 * LONG_S  # they import torch
    for worker in watched.group.workers:
        worker.program = (sys.executable, "-m", "tests.engine.exchanging_worker", how)
    return watched


@pytest.mark.parametrize("how", ["apart", *slow("early")])
def test_workers_that_all_wait_for_each_other_are_ended(watch: Callable[..., Watched], how: str) -> None:
    """As where the network between them is lost and that to the engine is not: none hangs, and nobody computes."""
    watched = exchanging(watch, how, worker_still_s=4.0, worker_hung_s=STARTS_S)
    if how == "apart":
        watched.start()
        watched.group.send(ForgetCheckpoint("apart"))
    else:
        watched.group.start_if_due()
    watched.until(lambda: watched.ends)
    name = "worker_still_s" if how == "apart" else "worker_hung_s"
    why = rf"all wait for each other in an exchange, and nothing comes: it had made no progress in its work for \d+ s \({name}\)"
    assert re.fullmatch(rf"worker \d of 3: the worker process ended unexpectedly \({why} and was killed\)", watched.ends[0])
    assert watched.pids == []


def test_a_worker_that_hangs_while_it_starts_is_named_when_the_others_wait_for_it(watch: Callable[..., Watched]) -> None:
    watched = exchanging(watch, "hang", worker_hung_s=STARTS_S)
    watched.group.start_if_due()
    watched.until(lambda: watched.ends)
    why = r"it had made no progress in its work for \d+ s \(worker_hung_s\) and was killed"
    assert re.fullmatch(rf"worker 1 of 3: the worker process ended unexpectedly \({why}\)", watched.ends[0])


def test_what_one_told_before_another_became_ready_does_not_end_it() -> None:
    """All come out of their meeting at once, and say so one after the other: the last heartbeat of the last is of the meeting still."""
    config = Config().server
    ready, starting = Signs(config), Signs(config)
    ready.is_ready = True
    starting.beat(Alive(1.0, config.worker_hung_s + 1, config.worker_hung_s + 1, True))
    starting.another_went_on()
    for beats in range(1, SETTLED + 1):
        starting.beat(Alive(1.0, config.worker_hung_s + 1, config.worker_hung_s + 1, True))
        assert (hanging([ready, starting]) == [starting]) == (beats == SETTLED)
    starting.beat(Alive(1.0, 0.5, 0.5, True))
    assert not hanging([ready, starting])


@pytest.mark.slow  # `test_worker_process.py` has the same of one worker; this one computes for half a minute
def test_a_worker_that_needs_long_to_start_is_waited_for(watch: Callable[..., Watched]) -> None:
    watched = exchanging(watch, "compute", worker_hung_s=STARTS_S)
    watched.start()
    assert watched.ends == []


def test_workers_that_do_not_end_share_the_time_that_they_are_given(watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would keep an engine that ends for as many times that long."""
    watched = watch(3, "stubborn")
    watched.start()
    waited: list[float] = []
    for worker in watched.group.workers:

        def stop(timeout_s: float, stop: Callable[[float], None] = worker.stop) -> None:
            waited.append(timeout_s)
            stop(timeout_s)

        monkeypatch.setattr(worker, "stop", stop)
    watched.group.stop(1.0)
    assert 0.0 < waited[0] <= 1.0
    assert waited[1:] == [0.0, 0.0]  # the first had all of it
    monkeypatch.undo()


@pytest.mark.parametrize("how", ["member", "stubborn", "loading"])
def test_a_group_that_is_told_to_stop_ends_by_itself_or_is_killed(watch: Callable[..., Watched], how: str) -> None:
    watched = watch(2, how)
    watched.group.start_if_due()
    if how != "loading":
        watched.until(lambda: watched.group.is_ready)
    processes = [worker.process for worker in watched.group.workers]
    meeting = watched.group._meeting
    watched.group.stop(LONG_S if how == "member" else 0.2)
    assert [process.poll() for process in processes if process] == [0 if how == "member" else -signal.SIGKILL] * 2
    assert meeting is not None
    assert not meeting.exists()


# ---- With the engine


def test_the_server_is_told_once_that_workers_are_lost_and_once_that_all_are_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "FIRST_DELAY_S", 0.0)
    told: list[Message] = []
    with engine_with("member", tmp_path, 3) as (server, engine):

        def until(messages: int) -> None:
            deadline = time.monotonic() + LONG_S
            while len(told) < messages:
                assert time.monotonic() < deadline, told
                engine.receive(0.05)
                engine.turn()
                told.extend(message for message in server.receive() if isinstance(message, Ready | Recovering))

        facts = FACTS.to_dict() | {"max_trained": 22, "max_sampled": 20}
        expected: list[Message] = [Ready([facts])]
        until(1)
        for rank in (2, 0):
            pid = engine.workers.workers[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            server.send(sample(rank))  # on its way to workers that are no more
            expected += [Recovering(f"worker {rank} of 3: {KILLED}"), Ready([facts])]
            until(len(expected))
        engine.receive(0.05)
        assert told == expected


def test_an_engine_with_a_worker_that_cannot_start_ends_and_names_it(tmp_path: Path) -> None:
    with (
        engine_with("broken", tmp_path, 2) as (_, engine),
        pytest.raises(
            ConfigError, match=r"^worker [01] of 2: the worker process ended unexpectedly \(exit code 2\) before it could take work"
        ),
    ):
        engine.run(os.getppid())
