"""The demo as a user starts it, cut short."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.running import START_S

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


@pytest.mark.slow  # as the other
def test_the_demo_shows_its_run_until_it_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--epochs", "1", "--stay", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        line = next(line for line in demo.stdout if "goes on until" in line)
        (run,) = httpx.get(line.split()[-2].rstrip(",") + ".json", timeout=START_S).json()["runs"]
        assert run["checkpoint"].endswith("/sampler_weights/digits")
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=START_S) == 0
    assert "the engine stops" in (tmp_path / "server.log").read_text()
