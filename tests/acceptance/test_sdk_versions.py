"""Both ends of the range of SDK versions: the newest is installed with the tests, the oldest beside it, without its
dependencies.

Invariant: The oldest and the newest supported SDK come to the same numbers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from tests.acceptance import sdk_session
from tests.preloaded import REAL_PYTHON
from tests.running import START_S, Server
from tinsmith.server.routes.service import NEWEST, OLDEST


@pytest.fixture(scope="module")
def oldest() -> Path:
    """Where the oldest SDK lies: downloaded once, into the environment that runs the tests.

    It shares what the newest needs.
    """
    directory = Path(sys.prefix) / f"tinker-{OLDEST}"
    if not directory.exists():
        install = [
            REAL_PYTHON,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            f"tinker=={OLDEST}",
        ]
        subprocess.run([*install, "--target", str(directory)], check=True, timeout=START_S)
    return directory


def test_the_oldest_and_the_newest_sdk_come_to_the_same(server: Server, oldest: Path) -> None:
    command = [REAL_PYTHON, sdk_session.__file__, server.url]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
        env=os.environ | {"PYTHONPATH": str(oldest)},
    )
    assert done.returncode == 0, done.stderr
    old, new = json.loads(done.stdout), sdk_session.run(server.url)
    assert (old.pop("version"), new.pop("version"), tinker.__version__) == (OLDEST, NEWEST, NEWEST)
    assert new["losses"][2] < new["losses"][0]
    assert new["scores"][0] == pytest.approx(new["scores"][1], rel=1e-4)
    assert new["checkpoints"] == ["sampler_weights/sdk", "weights/sdk"]
    for numbers in ("losses", "prompt"):
        assert old.pop(numbers) == pytest.approx(new.pop(numbers), rel=1e-4)
    assert old.pop("scores")[0] == pytest.approx(new.pop("scores")[1], rel=1e-4)
    assert old == new
