"""Signs that a process gets on, judged in a process of its own: in this one other tests have left threads and children."""

import subprocess
from pathlib import Path

from tests.preloaded import REAL_PYTHON
from tests.running import START_S

ROOT = Path(__file__).parents[2]


def test_signs_of_progress() -> None:
    command = [REAL_PYTHON, "-m", "tests.protocol.progress_alone"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "9 passed" in ended.stdout
