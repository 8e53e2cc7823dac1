"""Directories of weights: those of processes that have certainly ended are deleted, those of others are left alone.

Invariant: Sockets and weights left behind are deleted only if their process has certainly ended, also where several
machines share the directory.
"""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.preloaded import REAL_PYTHON
from tests.running import START_S
from tinsmith.models.base import BaseModel
from tinsmith.protocol import own_directory
from tinsmith.protocol.link import ParentLink
from tinsmith.protocol.own_directory import OWNER, OwnDirectory, boot_name
from tinsmith.sampling.vllm.weights import PREFIX, WeightFiles

HOLDER = """
import sys
from pathlib import Path
from tinsmith.protocol import own_directory
if sys.argv[2]:
    own_directory._BOOT_ID = Path(sys.argv[2])
print(own_directory.OwnDirectory("tinsmith-weights-", Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""

TWO_LINKS = """
import sys
from tinsmith.protocol.link import ParentLink
links = [ParentLink(), ParentLink()]
print(flush=True)
sys.stdin.read()
"""

Holder = tuple[Path, "subprocess.Popen[str]"]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def holding(shared: Path) -> Iterator[Callable[..., Holder]]:
    """Starts a process that has a directory until it ends, on this machine or on one with another boot id."""
    with ExitStack() as stack:

        def start(boot: Path | None = None) -> Holder:
            command = [REAL_PYTHON, "-c", HOLDER, str(shared), str(boot or "")]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            return Path(process.stdout.readline().strip()), process

        yield start


def test_what_a_dead_process_of_this_machine_has_left_is_deleted_and_what_another_machine_has_there_stays(
    holding: Callable[..., Holder], shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its locks may not be seen here, and the number of its process is that of nobody here.

    Nor does that machine delete ours.
    """
    caplog.set_level("INFO")
    boot = tmp_path / "boot_id"
    boot.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    (path, process), (other, _), (foreign, elsewhere) = holding(), holding(), holding(boot)
    assert foreign.name.startswith(f"{PREFIX}b0123456789ab-")
    (path / "1").mkdir()
    (path / "1" / "adapter_model.safetensors").write_bytes(b"weights")
    OwnDirectory(PREFIX, shared).close()
    assert (path / "1" / "adapter_model.safetensors").exists()
    assert (path / OWNER).read_text().startswith(f"process {process.pid} on ")
    for killed in (process, elsewhere):
        killed.kill()
        killed.wait(START_S)
    OwnDirectory(PREFIX, shared).close()  # what each start of a server does, when another has died
    assert [path.exists(), other.exists(), foreign.exists()] == [False, True, True]
    assert f"1 directories {PREFIX}* in {shared} are of other machines" in caplog.text


def test_directories_without_an_owner_on_this_machine_stay_but_for_one_that_somebody_has_begun_to_delete(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Earlier versions named theirs by the number of a process, on whatever machine: it may live there, though nobody
    here has it."""
    dead = subprocess.Popen([REAL_PYTHON, "-c", ""])
    dead.wait()
    others = {f"{PREFIX}{name}" for name in (f"{dead.pid}-a", f"{os.getpid()}-b", "mine")}
    for name in (*others, f"{PREFIX}{boot_name()}-half"):
        (tmp_path / name).mkdir()
    files = WeightFiles(text_base, str(tmp_path))
    assert files.root.stat().st_mode & 0o777 == 0o700
    assert not files.root.name.removeprefix(PREFIX).partition("-")[0].isdecimal()
    assert {path.name for path in tmp_path.iterdir()} == {*others, files.root.name}
    for _ in range(2):
        files.close()
        assert not files.root.exists()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for this process and those that it starts, of a path that leaves room for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_a_process_that_is_killed_leaves_its_sockets_to_the_next_which_deletes_them(place: Path) -> None:
    with subprocess.Popen([REAL_PYTHON, "-c", TWO_LINKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = set(place.iterdir())
        with contextlib.closing(ParentLink()):
            assert len(left) == 2
            assert left < set(place.iterdir())
            process.kill()
    with contextlib.closing(ParentLink()):
        assert left.isdisjoint(place.iterdir())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("lacks", ["locks", "a boot id"])
def test_where_owners_cannot_be_told_nothing_is_deleted(
    lacks: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError("No locks available")

    with monkeypatch.context() as patch:
        if lacks == "locks":
            patch.setattr(fcntl, "flock", refuse)
        else:
            patch.setattr(own_directory, "_BOOT_ID", shared / "none")
            assert boot_name() == ""
        kept = [OwnDirectory(PREFIX, shared) for _ in range(2)]
    kept.append(OwnDirectory(PREFIX, shared))
    assert {path.name for path in shared.iterdir()} == {each.path.name for each in kept}
