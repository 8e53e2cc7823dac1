"""The rules for engine and worker processes: how one is configured, watched, restarted, and its end described."""

import ctypes
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass

import orjson
import psutil

from tinsmith.config import Config, from_tree, to_tree
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.place import Place

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
"""Between the end of a process that was never ready and the start of the next, in seconds: doubled each time."""

_FIRST_STARTS = 3
"""Processes of which one must be ready, or no more are started."""

WATCH_S = 1.0
"""Seconds between two looks for heartbeats."""

LAST_WORDS_S = 0.5
"""Seconds that the last messages of an ended process may take to arrive."""

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the thread that started it has ended."""


def leave_signals_to_server() -> None:
    """Ignore what reaches all processes of a terminal or service, and the server handles: Ctrl-C, SIGTERM, SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that are started would inherit


def end_with_parent() -> None:
    """Let the kernel end this process when the thread that started it has ended, even if it is stopped then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Start:
    """What a worker is told, where other users of its host do not see it."""

    address: str
    """Address of the engine's end of its link."""
    keys: ChildKeys | None
    """Keys, if that link goes over TCP."""
    place: Place
    config: Config
    again: bool
    """Whether another was ready before it with the same program: what passed its full check is not checked again."""

    def to_bytes(self) -> bytes:
        return orjson.dumps(asdict(self) | {"config": to_tree(self.config)})

    @classmethod
    def from_bytes(cls, told: bytes) -> "Start":
        """Undo `to_bytes`."""
        start = orjson.loads(told)
        keys = None if start["keys"] is None else ChildKeys(**start["keys"])
        return cls(start["address"], keys, Place(**start["place"]), from_tree(start["config"]), start["again"])


@dataclass(frozen=True)
class EngineStart:
    """What an engine is told."""

    address: str
    """Address of the server's end of its link."""
    number: int
    """Its number among the engines of its data directory (`store/lease.py`)."""
    config: Config

    def to_bytes(self) -> bytes:
        return orjson.dumps(asdict(self) | {"config": to_tree(self.config)})

    @classmethod
    def from_bytes(cls, told: bytes) -> "EngineStart":
        """Undo `to_bytes`."""
        start = orjson.loads(told)
        return cls(start["address"], start["number"], from_tree(start["config"]))


def is_stopped(pid: int | None) -> bool:
    """Whether a process of this host is stopped, by SIGSTOP for example."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def next_delay_s(last_s: float, was_ready: bool) -> float:
    """Seconds until the next process is started, after a delay of `last_s` before the one that has ended."""
    return 0.0 if was_ready else min(max(FIRST_DELAY_S, 2 * last_s), LONGEST_DELAY_S)


def is_hopeless(exit_code: int, starts: int) -> bool:
    """Whether no process will be ready, after so many starts of which none was: one that ended by itself knows why."""
    return exit_code >= 0 or starts >= _FIRST_STARTS


def exit_text(exit_code: int) -> str:
    """Describe the end of a process from its exit code as `subprocess` gives it."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
