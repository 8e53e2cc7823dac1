"""The rules for engine and worker processes: how one is configured, watched, restarted, and its end described."""

import signal
from dataclasses import asdict
from typing import BinaryIO

import orjson

from tinsmith.config import Config, from_tree, to_tree
from tinsmith.protocol.gate import ChildKeys

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
"""Between the end of a process and the start of the next, in seconds: doubled for each that was never ready."""

WATCH_S = 1.0
"""Seconds between two looks for heartbeats."""

LAST_WORDS_S = 0.5
"""Seconds that the last messages of an ended process may take to arrive."""


def leave_signals_to_server() -> None:
    """Ignore what reaches all processes of a terminal or service, and the server handles: Ctrl-C, SIGTERM, SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that are started would inherit


def start_bytes(config: Config, keys: ChildKeys | None) -> bytes:
    """Encode a worker's configuration and keys for its standard input, which other users of its host do not see."""
    return orjson.dumps({"config": to_tree(config), "keys": None if keys is None else asdict(keys)})


def read_start(standard_input: BinaryIO) -> tuple[Config, ChildKeys | None]:
    """Undo `start_bytes`. There are keys if the engine's link goes over TCP."""
    started = orjson.loads(standard_input.read())
    keys = started["keys"]
    return from_tree(started["config"]), None if keys is None else ChildKeys(**keys)


def next_delay_s(last_s: float, was_ready: bool) -> float:
    """Seconds until the next process is started, after a delay of `last_s` before the one that has ended."""
    return FIRST_DELAY_S if was_ready else min(max(FIRST_DELAY_S, 2 * last_s), LONGEST_DELAY_S)


def exit_text(exit_code: int) -> str:
    """Describe the end of a process from its exit code as `subprocess` gives it."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
