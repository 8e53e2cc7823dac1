"""Directories of weights: those of processes that have certainly ended are deleted, those of others are left alone."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.preloaded import REAL_PYTHON
from tests.running import START_S
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm import own_directory
from tinsmith.sampling.vllm.own_directory import OWNER, PREFIX, OwnDirectory, boot_name
from tinsmith.sampling.vllm.weights import WeightFiles

HOLDER = """
import sys
from pathlib import Path
from tinsmith.sampling.vllm import own_directory
if sys.argv[2]:
    own_directory._BOOT_ID = Path(sys.argv[2])
print(own_directory.OwnDirectory(Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""

Holder = tuple[Path, "subprocess.Popen[str]"]


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    """Starts a process that has a directory until it ends, on this machine or on one with another boot id."""
    with ExitStack() as stack:

        def start(boot: Path | None = None) -> Holder:
            command = [REAL_PYTHON, "-c", HOLDER, str(place(tmp_path)), str(boot or "")]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return Path(process.stdout.readline().strip()), process

        yield start


def place(tmp_path: Path) -> Path:
    """What --vllm-dir names."""
    directory = tmp_path / "shared"
    directory.mkdir(exist_ok=True)
    return directory


def dies(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(START_S)


def start_another(tmp_path: Path) -> None:
    """What each start of a server does."""
    OwnDirectory(place(tmp_path)).close()


def test_what_a_dead_process_of_this_machine_has_left_is_deleted(holding: Callable[..., Holder], tmp_path: Path) -> None:
    path, process = holding()
    other, _ = holding()
    (path / "1").mkdir()
    (path / "1" / "adapter_model.safetensors").write_bytes(b"weights")
    start_another(tmp_path)
    assert (path / "1" / "adapter_model.safetensors").exists()
    assert (path / OWNER).read_text().startswith(f"process {process.pid} on ")
    dies(process)
    start_another(tmp_path)
    assert not path.exists()
    assert other.exists()


def test_what_another_machine_has_there_stays_whether_or_not_it_is_in_use(
    holding: Callable[..., Holder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its locks may not be seen here, and the number of its process is that of nobody here. Nor does that machine delete ours."""
    caplog.set_level("INFO")
    boot = tmp_path / "boot_id"
    boot.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    here, _ = holding()
    path, process = holding(boot)
    assert path.name.startswith(f"{PREFIX}b0123456789ab-")
    assert here.exists()
    dies(process)
    start_another(tmp_path)
    assert path.exists()
    assert f"1 directories {PREFIX}* in {place(tmp_path)} are of other machines" in caplog.text


def test_what_is_named_by_a_number_of_a_process_stays(text_base: BaseModel, tmp_path: Path) -> None:
    """As earlier versions named theirs, on whatever machine: it may live there, though nobody here has that number."""
    dead = subprocess.Popen([REAL_PYTHON, "-c", ""])
    dead.wait()
    for name in (f"{dead.pid}-a", f"{os.getpid()}-b", "mine"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    files = WeightFiles(text_base, str(tmp_path))
    assert files.root.stat().st_mode & 0o777 == 0o700
    assert not files.root.name.removeprefix(PREFIX).partition("-")[0].isdecimal()
    assert {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()} == {
        *(f"{dead.pid}-a", f"{os.getpid()}-b", "mine"),
        files.root.name.removeprefix(PREFIX),
    }
    files.close()
    assert not files.root.exists()
    files.close()


def test_a_directory_that_somebody_has_begun_to_delete_goes(tmp_path: Path) -> None:
    half = tmp_path / f"{PREFIX}{boot_name()}-half"
    half.mkdir()
    OwnDirectory(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_where_files_cannot_be_locked_nothing_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError("No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        unlocked, other = OwnDirectory(tmp_path), OwnDirectory(tmp_path)
    locked = OwnDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {each.path.name for each in (unlocked, other, locked)}


def test_a_system_without_boot_id_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_directory, "_BOOT_ID", tmp_path / "none")
    assert boot_name() == ""
    first, second = OwnDirectory(tmp_path), OwnDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {first.path.name, second.path.name}
