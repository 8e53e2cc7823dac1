"""Two runs on a server whose worker dies at random moments: the short form of `make chaos`.

Invariant: Whatever moment a worker is killed at, every operation succeeds once, and the curves of supervised and
reinforcement learning are those of an undisturbed server to the last bit.
"""

import signal
from pathlib import Path

from benchmarks.chaos import chaos
from tests.extent import amount
from tests.running import PROGRAM


def test_curves_are_the_same_though_the_worker_is_killed_at_random_moments(tmp_path: Path) -> None:
    victims = [("worker", signal.SIGKILL)]
    found = chaos(tmp_path, amount(2, 10), 33, victims, PROGRAM, lambda server, _: server.worker_pid())
    assert {name: len(run.curve) > 6 for name, run in found.runs.items()} == {"sft": True, "rl": True}
