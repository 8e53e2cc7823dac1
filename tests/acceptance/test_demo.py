"""The demo as a user starts it, cut short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (("--epochs", "2"), 0.6),  # twelve epochs, the default, end above 0.90
        (("--kind", "qwen3-5", "--epochs", "2"), 0.6),  # 0.83 in a run that was looked at
        (("--kind", "qwen3-5-moe", "--epochs", "10"), 0.9),
    ],
)
@pytest.mark.slow  # of what it does, each step is tested elsewhere
def test_the_demo_learns_to_read_and_draws_what_it_learned(
    tmp_path: Path, options: tuple[str, ...], bound: float
) -> None:
    command = [sys.executable, str(DEMO), *options, "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = re.search(r"held-out accuracy: (\d\.\d+) -> (\d\.\d+)", finished.stdout)
    assert printed, finished.stdout
    before, after = (float(number) for number in printed.groups())
    assert before < 0.2
    assert after > bound
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert "tinsmith serve --base-model Qwen/" in finished.stdout
