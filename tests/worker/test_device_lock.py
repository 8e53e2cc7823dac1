"""Which servers may use one GPU at the same time: real processes, and a GPU that does not exist."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.running import START_S
from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.worker.device_lock import lock, lock_device

HOLDER = """
import sys
from tinsmith.worker.device_lock import lock
held = lock(sys.argv[1], "cuda:0", shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""
GPU = "GPU-1-2"

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks of this test lie."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"tinsmith-{os.getuid()}"


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process, and waits until it holds the lock. Its end lets go of it."""
    with ExitStack() as stack:

        def start(how: str, gpu: str = GPU) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", HOLDER, gpu, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            return process

        yield start


def refused(shared: bool) -> str:
    """The error for a server that would use the GPU too."""
    with pytest.raises(ConfigError) as error:
        lock(GPU, "cuda:0 (a GPU)", shared, patience_s=0.0)
    return str(error.value)


def is_free() -> bool:
    """Whether a server may have the GPU for itself; it waits for one that ends just now."""
    lock(GPU, "cuda:0", shared=False, patience_s=START_S).close()
    return True


@pytest.mark.parametrize("how", ["alone", "shared"])
def test_who_wants_a_gpu_for_itself_is_refused_one_that_is_used(hold: Hold, how: str) -> None:
    holder = hold(how)
    text = refused(shared=False)
    assert text.startswith("cuda:0 (a GPU) is used by another server")
    assert "start both with --memory-share" in text
    if Path("/proc/locks").is_file():
        assert re.findall(r"process (\d+)", text) == [str(holder.pid)]


def test_who_shares_is_refused_one_that_another_has_for_itself(hold: Hold) -> None:
    hold("alone")
    assert "is used by another server" in refused(shared=True)


def test_several_may_share(hold: Hold) -> None:
    first, second = hold("shared"), hold("shared")
    lock(GPU, "cuda:0", shared=True, patience_s=0.0).close()
    first.kill()
    first.wait(START_S)
    assert "is used by another server" in refused(shared=False)
    second.kill()
    second.wait(START_S)
    assert is_free()


def test_another_gpu_is_free(hold: Hold) -> None:
    hold("alone", "GPU-1-3")
    assert is_free()


def test_a_holder_that_is_killed_leaves_the_gpu_to_the_next(hold: Hold) -> None:
    hold("alone").kill()
    assert is_free()
    assert hold("alone").poll() is None


def test_a_holder_hands_its_lock_to_no_program_that_it_starts() -> None:
    """A vLLM server, for instance, may outlive it by some seconds."""
    held = lock(GPU, "cuda:0", shared=False)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False):
        assert "is used by another server" in refused(shared=False)
        held.close()
        assert is_free()


def test_a_cpu_is_everybodys(place: Path) -> None:
    assert lock_device(ModelsConfig(device="cpu")) is None
    assert not place.exists()


def test_nobody_else_reads_or_writes_where_locks_lie(place: Path) -> None:
    assert is_free()
    assert place.stat().st_mode & 0o777 == 0o700
    (file,) = place.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def linked(place: Path) -> None:
    """A link to a directory that would do."""
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.parent / "elsewhere")


def opened(place: Path) -> None:
    """A directory into which everybody may write."""
    place.mkdir()
    place.chmod(0o777)


def written(place: Path) -> None:
    """A file."""
    place.write_text("")


@pytest.mark.parametrize("prepare", [linked, opened, written])
def test_a_place_that_is_not_the_users_alone_is_refused(place: Path, prepare: Callable[[Path], None]) -> None:
    prepare(place)
    with pytest.raises(ConfigError, match=f"{re.escape(str(place))}, which holds the locks of GPUs, .*; remove it"):
        lock(GPU, "cuda:0", shared=True)
    assert not (place.parent / "elsewhere" / f"{GPU}.lock").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_the_directory_of_somebody_else_is_refused(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 4711, 4711)
    with pytest.raises(ConfigError, match=r"must be this user's \(it belongs to user 4711\)"):
        lock(GPU, "cuda:0", shared=True)


def test_a_uuid_names_a_file_and_no_path() -> None:
    with pytest.raises(ConfigError, match="can name no file"):
        lock("../GPU", "cuda:0", shared=False)
