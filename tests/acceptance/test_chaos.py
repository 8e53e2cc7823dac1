"""Two runs on a server whose processes die at random moments: the short form of `make chaos`.

Invariant: Whatever moment worker, engine and server are killed at, every operation succeeds once, and the curves of
supervised and reinforcement learning are those of an undisturbed server to the last bit.
"""

import signal
from pathlib import Path

from benchmarks.chaos import chaos
from tests.extent import amount
from tests.running import PROGRAM, Server


def test_curves_are_the_same_though_processes_are_killed_at_random_moments(tmp_path: Path) -> None:
    def find(server: Server, victim: str) -> int:
        if victim == "server":
            return server.pid
        return server.worker_pid() if victim == "worker" else server.engine_pid()

    victims = [(name, signal.SIGKILL) for name in ("worker", "engine", "server")]
    found = chaos(tmp_path, amount(3, 12), 33, victims, PROGRAM, find)
    assert {name: len(run.curve) > 6 for name, run in found.runs.items()} == {"sft": True, "rl": True}
