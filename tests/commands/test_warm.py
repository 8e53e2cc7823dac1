"""What `tinsmith warm` leaves for the next start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import tinsmith_here


def test_the_next_start_finds_what_was_checked(
    family_dir: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize(
    ("options", "said"),
    [([], "holds no model (there is no config.json in it)"), (["--sampler", "vllm"], "with sampler=vllm, whose")],
)
def test_what_cannot_be_warmed_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    ran = tinsmith_here("warm", "--base-model", str(tmp_path), "--data-dir", str(tmp_path / "data"), *options)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr
