"""A process of the test run that crashes fails the run, whenever it does."""

import subprocess
from pathlib import Path

import pytest

from tests.preloaded import REAL_PYTHON
from tests.running import START_S

CRASH = """
import os, time
if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
    time.sleep(2.0)
    os._exit(0)
"""


@pytest.mark.parametrize("moment", ["while it looks for tests", "in a test"])
def test_a_process_that_crashes_fails_the_run(moment: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.crashes import pytest_testnodedown\n")
    for each in range(8):
        (tmp_path / f"test_{each}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    if moment == "in a test":
        (tmp_path / "test_3.py").write_text("def test_a():\n    import os\n    os._exit(0)\ndef test_b(): pass\n")
    else:
        (tmp_path / "test_8.py").write_text(CRASH)
    distribution = ["--numprocesses", "2", "--dist", "worksteal", "--max-worker-restart", "0"]  # as in `make test`
    command = [REAL_PYTHON, "-m", "pytest", "--rootdir", str(tmp_path), "-c", "/dev/null", *distribution, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    # The second is what pytest-xdist makes of it if it was just about to give that process another file.
    assert result.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERNAL_ERROR), result.stdout
