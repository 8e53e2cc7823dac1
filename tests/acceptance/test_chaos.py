"""Two runs on servers whose processes die at random moments: the short form of `make chaos`.

Invariant: Whatever moment worker, engine and server are killed at, every operation succeeds once, and the curves of
supervised and reinforcement learning are those of an undisturbed server to the last bit.
"""

from pathlib import Path
from signal import SIGKILL

import pytest

from benchmarks.chaos import Task, disturb, keep_quiet
from benchmarks.chaos_table import differs_at, read, table
from tests.extent import amount
from tests.running import PROGRAM

VICTIMS = [((name, SIGKILL),) for name in ("worker", "engine", "server")] * amount(1, 4)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_curves_are_the_same_though_processes_are_killed_at_random_moments(kind: str, tmp_path: Path) -> None:
    disturb(Task(kind, 1, "here", 1, VICTIMS), tmp_path, 33, program=PROGRAM)
    keep_quiet(Task(kind, 1), tmp_path, PROGRAM)
    found = read([tmp_path])
    lines, is_good = table(found)
    assert is_good, lines
    quiet, disturbed = found
    assert len(disturbed.kills) == len(VICTIMS)
    assert len(quiet.curve) >= len(disturbed.curve) > 2 * len(VICTIMS)
    quiet.curve[-3] = ("loss", 0.0)
    assert not table(found)[1]
    assert differs_at(quiet.curve, disturbed.curve) == len(quiet.curve) - 3
    quiet.curve.clear()
    assert not table(found)[1]
