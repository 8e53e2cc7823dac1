"""tinkerscope, which shows runs of the cookbook in a browser and samples their checkpoints, against our server."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.recipes.workshop import BASE_MODEL, PYTHON, Outcome, Workshop
from tests.running import START_S

PROGRAM = [str(PYTHON), "-m", "tinkerscope.cli"]


@pytest.fixture(scope="module")
def scope(random_models: Workshop, sl_loop: Outcome) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Run its commands; it serves the directory in which the recipe has left its run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    directory = random_models.directory
    environment = os.environ | {
        "TINKER_BASE_URL": random_models.url,
        "TINKER_API_KEY": "tml-recipes",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "cache"),
        "HOME": str(directory),
    }
    output = directory / "tinkerscope.log"

    def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
        asked = [*PROGRAM, "--base-url", f"http://127.0.0.1:{port}", *arguments]
        return subprocess.run(
            asked, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=START_S
        )

    with (
        output.open("w") as log,
        subprocess.Popen(
            [*PROGRAM, "serve", "sl_loop", "--port", str(port)], cwd=directory, env=environment, stdout=log, stderr=log
        ) as process,
    ):
        _wait_for(f"http://127.0.0.1:{port}", process, output)
        yield command
        process.terminate()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(url):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).is_success
    return False


def test_a_run_is_found_and_its_checkpoints_can_be_sampled(
    scope: Callable[..., "subprocess.CompletedProcess[str]"], sl_loop: Outcome
) -> None:
    listed = scope("ls").stdout
    row = next(line.split() for line in listed.splitlines() if BASE_MODEL in line)
    assert row[-3:] == [BASE_MODEL, str(len(sl_loop.checkpoints)), "yes"]
    sampled = scope("chat", row[0], "How are you?", "--max-tokens", "8", "--n", "2", "--logprobs")
    assert sampled.returncode == 0, sampled.stdout + sampled.stderr
    assert sampled.stdout.count("--- sample ") == 2
    assert sampled.stdout.count("  lp=-") > 2
