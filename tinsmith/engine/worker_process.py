"""A worker's process: started, watched through its heartbeats, and restarted when it has ended."""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from tinsmith.config import Config, ServerConfig
from tinsmith.engine.launching import WORKER, Launcher, Surroundings, WorkerProgram
from tinsmith.observing.metrics import Number
from tinsmith.observing.spans import MOST, Span
from tinsmith.protocol.child_process import (
    LAST_WORDS_S,
    WATCH_S,
    Start,
    exit_text,
    is_hopeless,
    is_stopped,
    next_delay_s,
)
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.link import ChildLink, ParentLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place
from tinsmith.protocol.questions import Answering, Answers
from tinsmith.protocol.serving import Alive, Bye, Shutdown
from tinsmith.protocol.work import WorkerReady, WorkerStatus

log = logging.getLogger(__name__)

SETTLED = 4
"""Heartbeats after which a worker tells of the time since another has gone on."""


class Liveness:
    """Signs of life and of progress of one worker.

    Silence is counted in looks, not by the clock: an engine that could not run itself has heard nothing either.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.last = Alive(0.0)
        self._silent_s = 0.0
        self.is_ready = False
        """Whether it was ready. While it loads libraries and models, it may be silent and still for longer."""
        self.beaten = True
        self.is_stopped = False
        """Whether the system says that it does not run: then it loads nothing either."""
        self.beats = 0
        """Heartbeats since another worker of its group became ready, and so left what this one may have waited in."""

    def beat(self, alive: Alive) -> None:
        self.last, self.beaten = alive, True
        self.beats += 1

    def another_went_on(self) -> None:
        """Note that another worker of its group has become ready: what this one told last may be of the time before."""
        self.beats = 0

    def look(self, since_s: float) -> None:
        """Count a look, `since_s` seconds after the last."""
        self._silent_s = 0.0 if self.beaten else self._silent_s + since_s
        self.beaten = False

    @property
    def silence(self) -> str:
        """Return that it has shown no sign of life for too long; else an empty text."""
        limit_s, name = self._shorter if self.is_stopped else self._patience
        return f"shown no sign of life for {self._silent_s:.0f} s ({name})" if self._silent_s >= limit_s else ""

    @property
    def stillness(self) -> str:
        """Return that it beats but has made no progress for too long, even waiting for others; else an empty text."""
        limit_s, name = self._patience
        return (
            f"made no progress in its work for {self.last.still_s:.0f} s ({name})"
            if self.last.still_s >= limit_s
            else ""
        )

    @property
    def standstill(self) -> str:
        """Return that it beats but has been in one call too long to come back; else an empty text."""
        too_long = self.last.stuck_s >= self._config.worker_stuck_s
        return f"been in one and the same call for {self.last.stuck_s:.0f} s (worker_stuck_s)" if too_long else ""

    @property
    def fault(self) -> str:
        """Return the reason why it hangs by itself; empty if it does not.

        While it waits for others, only its silence is one. One that is starting may take hours in one call, to download
        a model for example. That is too long only when others wait for it (`hanging`).
        """
        if self.last.waits or not self.is_ready:
            return self.silence
        return self.silence or self.stillness or self.standstill

    @property
    def _patience(self) -> tuple[float, str]:
        """Seconds without a sign, and the setting that says so."""
        return self._shorter if self.is_ready else (self._config.worker_hung_s, "worker_hung_s")

    @property
    def _shorter(self) -> tuple[float, str]:
        return min((self._config.worker_hung_s, "worker_hung_s"), (self._config.worker_still_s, "worker_still_s"))


def hanging(workers: Sequence[Liveness]) -> Sequence[Liveness]:
    """Return those of a group that keep the others from going on, or all if each waits for the others in an exchange.

    There are none if one of them moves, or may be given work. Those that are ready wait for those that are starting,
    and are not what keeps them.
    """
    starting = [liveness for liveness in workers if not liveness.is_ready]
    concerned = starting or workers
    if not any(liveness.last.waits for liveness in concerned):
        return ()
    if not all(liveness.beats >= SETTLED and (liveness.stillness or liveness.standstill) for liveness in concerned):
        return ()
    return [liveness for liveness in concerned if not liveness.last.waits] or concerned


class WorkerProcess:
    """One worker after the other, on the same device."""

    def __init__(
        self,
        config: Config,
        engine: ChildLink,
        program: Sequence[str] = WORKER,
        launcher: Launcher | None = None,
    ) -> None:
        """Nothing runs yet.

        `engine` is woken up by what the worker says. Without a `launcher` it is a child of this process.
        """
        self.config = config
        self.answers: Answers | None = None
        """Answers the next worker's questions, in a thread. None leaves them without an answer."""
        self.answering: Answering | None = None
        self.launcher = launcher or Launcher()
        self.program = program
        self.place = Place()
        self.environment: Mapping[str, str] = {}
        self.engine = engine
        self.link: ParentLink | None = None
        self.process: WorkerProgram | None = None
        self.state: Literal["starting", "ready", "down"] = "down"
        self.device = ""
        self.models: dict[str, ModelFacts] = {}
        self.numbers: list[Number] = []
        """What it counted at its last report; nothing of one that has ended."""
        self.spans: deque[Span] = deque(maxlen=MOST)
        """What workers have done, until somebody takes it."""
        self.liveness = Liveness(config.server)
        self.fault = ""
        """Why the worker that runs, or has just ended, was to end; empty if nobody knows."""
        self.follows = False
        """Whether the worker that has just ended did so because another had."""
        self.starts = 0
        self.is_hopeless = False
        """Whether none was ever ready, and the end of the last says that none will be."""
        self.last_messages: list[Message] = []
        """Messages of a worker that has ended which `receive` did not return."""
        self._was_ready = False
        self._delay_s = 0.0
        self._start_at = 0.0
        self._looked_at = 0.0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def wait_s(self) -> float:
        """Seconds until `start_if_due` would start one; endless while one runs."""
        return max(0.0, self._start_at - time.monotonic()) if self.process is None else float("inf")

    @property
    def surroundings(self) -> Surroundings:
        """The program, and the environment that it has."""
        return Surroundings(self.program, self.environment)

    def start_if_due(self) -> None:
        """Start a worker if none runs and it is time."""
        if self.process is not None or self.wait_s > 0:
            return
        self.link = ParentLink(self.launcher.host)
        self.engine.listen_to(self.link)
        if self.answers is not None:
            self.answering = Answering(self.link.take_questions(), self.answers)
        start = Start(self.link.address, self.link.keys, self.place, self.config, again=bool(self.models))
        self.process = self.launcher.launch(self.surroundings, start)
        self.starts += 1
        self.state, self.fault, self.follows, self._was_ready = "starting", "", False, False
        self._looked_at, self.liveness = time.monotonic(), Liveness(self.config.server)

    def send(self, message: Message) -> None:
        """Tell a worker that is ready. What is meant for another is dropped: it has nothing that it would concern."""
        if self.link is not None and self.is_ready:
            self.link.send(message)

    def receive(self) -> list[Message]:
        """Return the worker's messages, except those about its process."""
        if self.link is None:
            return []
        for beat in self.link.heartbeats():
            if isinstance(beat, Alive):
                self.liveness.beat(beat)
            elif isinstance(beat, WorkerStatus):
                self.numbers = beat.numbers
                self.spans.extend(beat.spans)
        messages: list[Message] = []
        for message in self.link.receive():
            match message:
                case WorkerReady():
                    self.state, self._was_ready, self.liveness.is_ready = "ready", True, True
                    self.device = message.device
                    self.models = {facts.name: facts for facts in (ModelFacts(**model) for model in message.models)}
                    messages.append(message)
                case Bye():
                    self.fault, self.follows = message.reason, message.follows
                case _:
                    messages.append(message)
        return messages

    def watch(self) -> None:
        """Kill a worker that has shown no sign of life, or of progress in its work, for too long."""
        now = time.monotonic()
        if self.process is None or now - self._looked_at < WATCH_S:
            return
        self._looked_at = now
        self.liveness.look(WATCH_S)
        self.liveness.is_stopped = self.launcher.host is None and is_stopped(self.pid)
        if self.liveness.fault:
            self.kill_hung(f"it had {self.liveness.fault} and was killed")

    def kill_hung(self, fault: str) -> None:
        """End a worker for this reason, without waiting for it; the log is told at once."""
        assert self.process is not None
        self.fault = fault
        log.error("%s (process %s) is ended: %s", self.place.name, self.pid, fault)
        self.process.kill()
        self.liveness = Liveness(self.config.server)

    def ended(self) -> str | None:
        """Return why the worker has ended, once; None while it runs, or if none does.

        Its last messages are in `last_messages`.
        """
        if self.process is None or (exit_code := self.process.poll()) is None:
            return None
        assert self.link is not None
        self.last_messages = self.receive()
        deadline = time.monotonic() + LAST_WORDS_S
        # Of one that was killed there are no last words
        while not self.fault and exit_code > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
            self.last_messages += self.receive()
        reason = f"the worker process ended unexpectedly ({self.fault or self.process.fault or exit_text(exit_code)})"
        self._close_link()
        self.state, self.liveness = "down", Liveness(self.config.server)
        self.numbers = []
        self.is_hopeless = not self.models and is_hopeless(exit_code, self.starts)
        self._delay_s = next_delay_s(self._delay_s, self._was_ready)
        self._start_at = time.monotonic() + self._delay_s
        return reason

    def kill(self, wait: bool = True) -> None:
        """End the worker at once, if one runs; `ended` tells of it."""
        if self.process is not None:
            self.process.kill()
            if wait:
                self.process.wait()

    def begin_to_stop(self) -> None:
        if self.link is not None:
            self.link.send(Shutdown())

    def stop(self, timeout_s: float) -> None:
        """Tell it to stop and wait for its end; kill it after `timeout_s`."""
        if self.process is None or self.link is None:
            return
        self.begin_to_stop()
        if self.process.wait(timeout_s if self.is_ready else 0.0) is None:
            self.kill()
        self._close_link()
        self.state = "down"

    def _close_link(self) -> None:
        assert self.link is not None
        self.engine.forget(self.link)
        if self.answering is not None:
            self.answering.close()
        self.link.close()
        self.link = self.process = self.answering = None
