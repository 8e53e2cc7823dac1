"""Decides from a worker's heartbeats, and from their absence, whether it hangs."""

from collections.abc import Sequence

from tinsmith.config import ServerConfig
from tinsmith.protocol.serving import Alive

SETTLED = 4
"""So many heartbeats after another worker has gone on, what one tells is of the time after that."""


class Liveness:
    """Signs of life and of progress of one worker.

    Silence is counted in looks, not by the clock: an engine that could not run itself, because it was stopped or its machine slept, has
    heard nothing either.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Start watching a worker that has just been started."""
        self._config = config
        self._last = Alive(0.0)
        self._silent_s = 0.0
        self.is_ready = False
        """Whether it was ready for work. One that is starting may be silent and still for longer: it loads libraries and models."""
        self.beaten = True
        """Whether a heartbeat came since the last look."""
        self.is_stopped = False
        """Whether the system says that it does not run: then it loads nothing either."""
        self._beats = 0
        """Heartbeats since another worker of its group has become ready, and so has come out of what this one may have waited in."""

    @property
    def busy_s(self) -> float:
        """Seconds that it had been in its current turn at the last heartbeat; 0 while it waits for work."""
        return self._last.busy_s

    @property
    def waits(self) -> bool:
        """Whether it was in an exchange with others at the last heartbeat."""
        return self._last.waits

    def beat(self, alive: Alive) -> None:
        """A heartbeat has come."""
        self._last, self.beaten = alive, True
        self._beats += 1

    def another_went_on(self) -> None:
        """Another worker of its group has become ready: what this one told last may be of the time before."""
        self._beats = 0

    @property
    def is_settled(self) -> bool:
        """Whether what it tells is of the time since another went on."""
        return self._beats >= SETTLED

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
        """Return that it beats and has made no progress for too long, even if it waits for others; else an empty text."""
        limit_s, name = self._patience
        return f"made no progress in its work for {self._last.still_s:.0f} s ({name})" if self._last.still_s >= limit_s else ""

    @property
    def stuck_s(self) -> float:
        """Seconds that it had been in one and the same call at the last heartbeat."""
        return self._last.stuck_s

    @property
    def standstill(self) -> str:
        """Return that it has been in one call for so long that it will not come back, though it beats; else an empty text."""
        too_long = self.stuck_s >= self._config.worker_stuck_s
        return f"been in one and the same call for {self.stuck_s:.0f} s (worker_stuck_s)" if too_long else ""

    @property
    def fault(self) -> str:
        """Return the reason why it hangs by itself; empty if it does not. While it waits for others, only its silence is one.

        One that is starting may take hours in one call: it downloads a model, or waits for another process that does. Only when others wait
        for it is that too long (`hanging`).
        """
        if self.waits or not self.is_ready:
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
    """Those of a group that keep the others from going on, or all if each waits for the others in an exchange: nothing can come of it then.

    Empty if one of them moves, or may be given work. Those that are ready wait for those that are starting, and are not what keeps them.
    """
    starting = [liveness for liveness in workers if not liveness.is_ready]
    concerned = starting or workers
    if not any(liveness.waits for liveness in concerned):
        return ()
    if not all(liveness.is_settled and (liveness.stillness or liveness.standstill) for liveness in concerned):
        return ()
    return [liveness for liveness in concerned if not liveness.waits] or concerned
