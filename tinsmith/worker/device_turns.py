"""Turns of trainer and vLLM servers on one GPU (--vllm-turn-s).

    sampling -> falling asleep -> training -> waking -> sampling ...

Who has the GPU keeps it for a turn if there is enough to do, however much waits on the other side, and no longer if
anything waits there. Without a length of turns the trainer always has it, and nobody sleeps.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""Seconds without work after which a turn ends: there is a moment without work between two steps of a client."""


class Sleeper(Protocol):
    """A sampler whose servers can sleep."""

    @property
    def has_samples(self) -> bool:
        """Whether its servers are needed."""
        ...

    def fall_asleep(self) -> "Future[None]":
        """Let the servers leave the GPU."""
        ...

    def wake_up(self) -> "Future[None]":
        """Let them have it again."""
        ...


class DeviceTurns:
    """Decides, for the worker's thread, whether training or the samplers' servers have the GPU."""

    def __init__(
        self,
        sleepers: Sequence[Sleeper],
        turn_s: float,
        leave: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let the servers of `sleepers` have it first, because they start at once.

        `leave` gives back the trainer's spare memory.
        """
        self.sleepers = sleepers if turn_s else ()
        self.turn_s = turn_s
        self.leave = leave
        self.clock = clock
        self.state: Literal["sampling", "falling asleep", "training", "waking"] = (
            "sampling" if self.sleepers else "training"
        )
        self._switching: list[Future[None]] = []
        self._since = self._busy_at = clock()

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer has the GPU."""
        return self.state == "training"

    def look(self, wanted: bool) -> bool:
        """Return whether the trainer may use the GPU now; `wanted` says whether it has something to do. Call it often.

        Raises what keeps servers from falling asleep or waking.
        """
        if not self.sleepers:
            return True
        now = self.clock()
        sampled = any(sleeper.has_samples for sleeper in self.sleepers)
        if self._switching:
            self._finish_switch(now)
        if self.state == "sampling" and self._is_over(now, busy=sampled, others=wanted):
            self._switch("falling asleep", [sleeper.fall_asleep() for sleeper in self.sleepers])
        elif self.state == "training" and self._is_over(now, busy=wanted, others=sampled):
            self.leave()
            self._switch("waking", [sleeper.wake_up() for sleeper in self.sleepers])
        return self.is_trainers

    def has_trained(self) -> None:
        """Note that the trainer has used the GPU until now."""
        self._busy_at = self.clock()

    def patience_s(self, longest: float) -> float:
        """Seconds after which `look` is to be called again, at most `longest`."""
        return min(longest, IDLE_S, self.turn_s) if self.sleepers else longest

    def _is_over(self, now: float, busy: bool, others: bool) -> bool:
        if busy:
            self._busy_at = now
        return others and (now - self._since >= self.turn_s or now - self._busy_at >= IDLE_S)

    def _switch(self, state: Literal["falling asleep", "waking"], switching: list["Future[None]"]) -> None:
        self.state, self._switching, self._since = state, switching, self.clock()

    def _finish_switch(self, now: float) -> None:
        if not all(future.done() for future in self._switching):
            return
        for future in self._switching:
            future.result()
        asleep = self.state == "falling asleep"
        log.info(
            "the GPU is %s now, after %.2f s", "the trainer's" if asleep else "the vLLM servers'", now - self._since
        )
        self.state, self._switching = "training" if asleep else "sampling", []
        self._since = self._busy_at = now
