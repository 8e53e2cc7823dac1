"""What `tinsmith warm` leaves for the next start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import tinsmith_here


def test_the_next_start_finds_what_was_checked(
    family_dir: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = [
        "warm",
        "--base-model",
        f"tiny={family_dir('qwen3')}",
        "--data-dir",
        str(tmp_path / "data"),
        "--device",
        "cpu",
        "--port",
        "1",
    ]
    said = []
    for _ in range(2):
        ran = tinsmith_here(*command)
        assert (ran.returncode, ran.stdout.startswith("ready after ")) == (0, True), ran.stderr
        said.append(capfd.readouterr().err)
    assert ["in its quick form" in each for each in said] == [False, True], said[1]
    assert "http://127.0.0.1:1," not in caplog.text  # a server may listen there


def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    ran = tinsmith_here("warm", "--base-model", str(tmp_path), "--data-dir", str(tmp_path / "data"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "holds no model (there is no config.json in it)" in ran.stderr
