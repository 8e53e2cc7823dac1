"""A worker as a child process of the engine: started, watched, and started again when it has ended."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.here import LONG_S, Beat
from tests.engine.light_worker import FACTS, REASON
from tests.preloaded import REAL_PYTHON
from tinsmith.config import Config, ServerConfig
from tinsmith.engine import launching
from tinsmith.engine.launching import Launcher, Surroundings
from tinsmith.engine.loop import Engine
from tinsmith.engine.worker_group import STAND_BY_S, WorkerGroup
from tinsmith.engine.worker_process import WorkerProcess
from tinsmith.errors import ConfigError
from tinsmith.protocol import child_process
from tinsmith.protocol.link import ChildLink, ParentLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import IMPORTS, ForgetCheckpoint, Starting
from tinsmith.protocol.work import Answer, WorkerReady


def light(how: str) -> tuple[str, ...]:
    """A worker program without models, which behaves so."""
    return REAL_PYTHON, str(Path(__file__).with_name("light_worker.py")), how


class Clock:
    """Time, of which more may pass at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + self.passed_s)


class Watched:
    """A worker process, with what it said and why it ended. Its engine's link is real, its engine's loop is `turn`."""

    def __init__(self, link: ChildLink, how: str, launcher: Launcher | None = None, **settings: Any) -> None:
        self.link = link
        self.process = WorkerProcess(Config(server=ServerConfig(**settings)), link, light(how), launcher)
        self.patience_s = LONG_S
        self.messages: list[Message] = []
        self.ends: list[str] = []

    def turn(self) -> None:
        """Once through what the engine's loop does with its worker, but for starting it."""
        self.link.receive(0.05)
        self.messages += self.process.receive()
        self.process.watch()
        reason = self.process.ended()
        self.ends += [] if reason is None else [reason]

    def until(self, seen: Callable[[], object]) -> None:
        """Go on until that is true."""
        deadline = time.perf_counter() + self.patience_s
        while not seen():
            assert time.perf_counter() < deadline, (vars(self.process), self.messages, self.ends)
            self.turn()

    def start(self) -> int:
        """Start one, and wait until it is ready; its process id."""
        self.process.start_if_due()
        self.until(lambda: self.process.is_ready)
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, path: str) -> None:
        self.process.send(ForgetCheckpoint(path))

    @property
    def answers(self) -> list[str]:
        return [message.result["path"] for message in self.messages if isinstance(message, Answer)]


@contextmanager
def link_of_an_engine() -> Iterator[tuple[ParentLink, ChildLink]]:
    """The server's end and the engine's end."""
    server = ParentLink()
    engine = ChildLink(server.address)
    yield server, engine
    engine.close()
    server.close()


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    """Make a worker process of some behaviour; what is left of it at the end is killed."""
    made: list[Watched] = []
    with link_of_an_engine() as (_, link):

        def make(how: str, **settings: Any) -> Watched:
            made.append(Watched(link, how, **settings))
            return made[-1]

        yield make
        for watched in made:
            watched.process.stop(0.0)


def test_a_worker_is_started_once_and_another_takes_the_place_of_one_that_is_killed(
    watch: Callable[..., Watched],
) -> None:
    """Its end is reported once. What is sent while none is ready blocks nobody, and never reaches the next."""
    worker = watch("ready")
    process = worker.process
    process.start_if_due()
    starting = process.pid
    assert (process.state, process.is_ready) == ("starting", False)
    worker.ask("too early")
    first = worker.start()
    assert first == starting
    assert worker.messages == [WorkerReady([FACTS.to_dict()], "cpu")]
    assert (process.device, process.models) == ("cpu", {"tiny": FACTS})
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # it is dead, which nobody has noticed yet
    for _ in range(1000):
        worker.ask("to the dead")
    worker.until(lambda: worker.ends)
    assert (process.state, process.pid, process.liveness.last.busy_s) == ("down", None, 0.0)
    assert process.wait_s == 0.0
    worker.ask("to nobody")
    assert worker.start() != first
    worker.ask("to the next")
    worker.until(lambda: worker.answers)
    assert (worker.answers, worker.ends) == (["to the next"], ["the worker process ended unexpectedly (signal 9)"])


def test_a_worker_that_cannot_start_is_tried_at_longer_and_longer_intervals(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was ready is no sign of something lasting."""
    monkeypatch.setattr(child_process, "FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr(child_process, "LONGEST_DELAY_S", 3000.0)
    clock = Clock(monkeypatch)
    worker = watch("ready")
    broken = REAL_PYTHON, "-c", "import os; os._exit(2)"
    delays, ends = list[float](), list[str]()
    for program in (broken, broken, broken, light("ready")):
        worker.process.program = program
        worker.ends.clear()
        worker.process.start_if_due()
        if program != broken:
            os.kill(worker.start(), signal.SIGKILL)
        worker.until(lambda: worker.ends)
        ends += worker.ends
        delays.append(worker.process.wait_s)
        clock.passed_s += delays[-1]
    assert delays == [pytest.approx(expected, abs=500.0) for expected in (1000.0, 2000.0, 3000.0)] + [0.0]
    assert ends[:3] == ["the worker process ended unexpectedly (exit code 2)"] * 3


@pytest.mark.parametrize("stand_by", [True, False])
def test_a_fork_server_stands_by_when_workers_have_been_ready_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stand_by: bool
) -> None:
    clock = Clock(monkeypatch)
    with link_of_an_engine() as (_, link):
        config = Config(data_dir=str(tmp_path), server=ServerConfig(stand_by=stand_by))
        group = WorkerGroup(config, link, 2, light("ready"))
        asked = list[tuple[Surroundings, bool]]()
        monkeypatch.setattr(group.launcher, "stand_by", lambda *given: asked.append(given))
        group.start_if_due()
        deadline = time.perf_counter() + LONG_S
        while not group.is_ready:
            assert time.perf_counter() < deadline
            link.receive(0.05)
            group.receive()
        seen = list[int]()
        for passed_s in (0.0, STAND_BY_S + 0.1, STAND_BY_S + 0.1):
            clock.passed_s += passed_s
            group.watch()
            seen.append(len(asked))
        assert asked == [(group.workers[0].surroundings, True)]
        assert (group.launcher._home == tmp_path) == stand_by
        group.stop(LONG_S)
    assert seen == [0, 1, 1]


def test_a_fork_server_stands_by_while_a_large_model_is_loaded_and_hears_that_workers_are_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(monkeypatch)
    with link_of_an_engine() as (_, link):
        group = WorkerGroup(Config(data_dir=str(tmp_path)), link, 1, light("ready"))
        asked = list[bool]()
        monkeypatch.setattr(group.launcher, "stand_by", lambda _, are_ready: asked.append(are_ready))
        group.start_if_due()
        for step in (IMPORTS, "loads tiny"):
            group._take(0, Starting(step, []))
            clock.passed_s += STAND_BY_S + 0.1
            group.watch()
            group.watch()
            asked.append(False)
        assert asked == [False, False, False]
        deadline = time.perf_counter() + LONG_S
        while not group.is_ready:
            assert time.perf_counter() < deadline
            link.receive(0.05)
            group.receive()
        clock.passed_s += STAND_BY_S + 0.1
        group.watch()
        assert asked[3:] == [True]
        group.stop(LONG_S)


@pytest.mark.parametrize(("path", "reason"), [("lost", REASON), ("follow", "the others are gone")])
def test_what_a_worker_says_at_last_is_the_reason_and_what_it_answered_before_is_kept(
    watch: Callable[..., Watched], path: str, reason: str
) -> None:
    worker = watch("ready")
    pid = worker.start()
    worker.ask("before")
    worker.ask(path)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is dead, which nobody has noticed yet
    assert worker.process.ended() == f"the worker process ended unexpectedly ({reason})"
    assert worker.process.follows == (path == "follow")
    assert worker.process.last_messages == [Answer(0, {"path": "before"})]


SILENT = "shown no sign of life for 4 s"
STUCK = r"been in one and the same call for \d+ s \(worker_stuck_s\)"


@pytest.mark.parametrize(
    ("how", "settings", "why"),
    [
        ("ready", {"worker_hung_s": 4.0}, rf"{SILENT} \(worker_hung_s\)"),
        # It is not waited for as long as one that loads
        ("loading", {"worker_still_s": 4.0}, rf"{SILENT} \(worker_still_s\)"),
        # It waits for a kernel that never ends, and uses its processor all the time.
        ("spin", {"worker_stuck_s": 2.0}, STUCK),
    ],
    ids=["silent", "frozen while it starts", "spinning"],
)
def test_a_worker_that_shows_no_life_or_no_progress_is_killed(
    watch: Callable[..., Watched], how: str, settings: dict[str, float], why: str
) -> None:
    worker = watch("loading" if how == "loading" else "ready", **settings)
    worker.process.start_if_due()
    worker.until(lambda: worker.process.is_ready or how == "loading")
    assert worker.process.pid is not None
    if how == "spin":
        worker.ask(how)
    else:
        os.kill(worker.process.pid, signal.SIGSTOP)
    worker.until(lambda: worker.ends)
    assert re.fullmatch(rf"the worker process ended unexpectedly \(it had {why} and was killed\)", worker.ends[0])


def test_an_engine_that_could_not_listen_itself_takes_nobody_for_silent(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    worker = watch("ready")
    pid = worker.start()
    for _ in range(3):
        clock.passed_s += 1000.0  # the machine slept for longer than a worker may be silent
        worker.process.watch()
        worker.until(lambda: worker.process.liveness.beaten)
    assert (worker.ends, worker.process.pid) == ([], pid)


@pytest.fixture
def spared(watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes that SIGKILL did not end, as where the kernel waits for a driver: it was not sent."""
    spared: list[int] = []
    monkeypatch.setattr("subprocess.Popen.kill", lambda process: spared.append(process.pid))
    monkeypatch.setattr(launching, "KILL_S", 0.5)
    yield spared
    for pid in {*spared}:
        os.kill(pid, signal.SIGKILL)


def test_a_worker_that_nothing_can_end_is_named_when_it_is_killed_and_left_behind(
    watch: Callable[..., Watched], spared: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread of its device hangs in a driver, while its heartbeats go on."""
    monkeypatch.setattr(child_process, "FIRST_DELAY_S", 0.0)
    worker = watch("ready", worker_still_s=8.0)
    first = worker.start()
    worker.ask("hang")
    worker.until(lambda: spared)
    assert f"worker (process {first}) is ended: it had made no progress in its work for" in caplog.text
    worker.until(lambda: worker.ends)
    assert re.search(
        r"\(it had made no progress in its work for \d+ s \(worker_still_s\) and was killed\)$", worker.ends[0]
    )
    assert caplog.text.count(f"process {first} does not end 0 s after it was killed") == 1
    assert worker.start() != first


def test_nobody_waits_for_ever_for_a_worker_that_nothing_can_end(
    watch: Callable[..., Watched], spared: list[int]
) -> None:
    worker = watch("stubborn")
    pid = worker.start()
    worker.process.stop(0.0)
    worker.until(lambda: worker.process.pid is None)
    assert pid in spared
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None  # it still runs


@pytest.mark.parametrize(("how", "code"), [("ready", 0), ("stubborn", -signal.SIGKILL)])
def test_a_worker_that_is_told_to_stop_ends_by_itself_or_is_killed(
    watch: Callable[..., Watched], how: str, code: int
) -> None:
    worker = watch(how)
    worker.start()
    process = worker.process.process
    assert process is not None
    worker.process.stop(LONG_S if how == "ready" else 0.2)
    assert (process.poll(), worker.process.state, worker.process.pid) == (code, "down", None)


# ---- With the engine


@contextmanager
def engine_with(how: str, data_dir: Path, count: int) -> Iterator[tuple[ParentLink, Engine]]:
    """An engine over workers of that behaviour, and the server's end of its link."""
    with link_of_an_engine() as (server, link):
        config = Config(["tiny=unused"], str(data_dir))
        workers = WorkerGroup(config, link, count, light(how))
        engine = Engine(config, link, Beat(), workers)  # type: ignore[arg-type]
        try:
            yield server, engine
        finally:
            workers.stop(0.0)


def test_an_engine_whose_first_workers_cannot_start_ends_with_the_reason(tmp_path: Path) -> None:
    why = rf"^worker [01] of 2: the .* \({REASON}\) before it could take work; its output above"
    with engine_with("lost", tmp_path, 2) as (_, engine), pytest.raises(ConfigError, match=why):
        engine.run(os.getppid())


def test_workers_that_are_killed_before_any_was_ready_are_started_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "FIRST_DELAY_S", 0.0)
    killed = list[int]()

    def kill_all(engine: Engine) -> None:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            engine.receive(0.02)
            pid = engine.workers.workers[1].pid
            if pid is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    why = r"^worker 1 of 2: .* \(signal 9\) before it could take work"
    with engine_with("loading", tmp_path, 2) as (_, engine), pytest.raises(ConfigError, match=why):
        kill_all(engine)
    assert len(killed) == 3


def test_a_worker_that_ends_before_it_reads_its_configuration_ends_no_engine() -> None:
    config = Config(["tiny=" + "x" * 2**20])  # more than a pipe takes at once
    with link_of_an_engine() as (_, link):
        process = WorkerProcess(config, link, (REAL_PYTHON, "-c", "import os; os._exit(9)"))
        process.start_if_due()
        deadline = time.monotonic() + LONG_S
        while (reason := process.ended()) is None:
            assert time.monotonic() < deadline
    assert reason == "the worker process ended unexpectedly (exit code 9)"
