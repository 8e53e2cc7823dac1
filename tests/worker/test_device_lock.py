"""Which servers may use one GPU at the same time: real processes, and a GPU that does not exist.

Invariant: A GPU that a server uses, or gives to its vLLM servers, is refused to another one, unless both were given a
share; the lock ends with its process, and lies where nobody else can write.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.preloaded import REAL_PYTHON
from tests.running import START_S
from tinsmith.config import Config, load
from tinsmith.errors import ConfigError
from tinsmith.worker.device_lock import lock, lock_devices

HOLDER = """
import sys
from tinsmith.worker.device_lock import lock
held = lock(sys.argv[1], "cuda:0", shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""
GPU = "GPU-1-2"
Hold = Callable[..., subprocess.Popen[str]]


def config_of(**options: object) -> Config:
    """Of a worker with one base model."""
    return load(options={"base_models": ["a=x/a"]} | options)


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
                subprocess.Popen(
                    [REAL_PYTHON, "-c", HOLDER, gpu, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            return process

        yield start


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch tell of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"GPU-{gpu}", name="a GPU")
    )


def refused(shared: bool, gpu: str = GPU) -> str:
    """The error for a server that would use the GPU too."""
    with pytest.raises(ConfigError) as error:
        lock(gpu, "cuda:0 (a GPU)", shared, patience_s=0.0)
    return str(error.value)


def is_free(gpu: str = GPU) -> bool:
    """Whether a server may have the GPU for itself; it waits for one that ends just now."""
    lock(gpu, "cuda:0", shared=False, patience_s=START_S).close()
    return True


@contextmanager
def working(**options: object) -> Iterator[int]:
    """A worker with these settings has all locks at once, as many as are returned.

    Here it is no process: locks exclude each other too.
    """
    held = lock_devices(config_of(**options), patience_s=0.0)
    try:
        yield len(held)
    finally:
        for each in held:
            each.close()


def is_refused(**options: object) -> str:
    """The error for another worker with these settings."""
    with pytest.raises(ConfigError) as error, working(**options):
        pass
    return str(error.value)


def test_a_gpu_is_one_servers_or_shared_by_several_until_their_processes_end(hold: Hold) -> None:
    alone, sharing = hold("alone"), [hold("shared", "GPU-4") for _ in range(2)]
    assert "is used by another server" in refused(shared=True)
    lock("GPU-4", "cuda:0", shared=True, patience_s=0.0).close()
    assert is_free("GPU-1-3")
    for gpu, holders in ((GPU, [alone]), ("GPU-4", sharing)):
        for holder in holders:
            text = refused(shared=False, gpu=gpu)
            assert text.startswith("cuda:0 (a GPU) is used by another server")
            assert "start both with --memory-share" in text
            assert not Path("/proc/locks").is_file() or str(holder.pid) in re.findall(r"process (\d+)", text)
            holder.kill()
            holder.wait(START_S)
        assert is_free(gpu)


def test_a_holder_hands_its_lock_to_no_program_that_it_starts() -> None:
    """A vLLM server, for instance, may outlive it by some seconds."""
    held = lock(GPU, "cuda:0", shared=False)
    with subprocess.Popen([REAL_PYTHON, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False):
        assert "is used by another server" in refused(shared=False)
        held.close()
        assert is_free()


def test_a_cpu_is_everybodys(place: Path) -> None:
    only = {"device": "cpu", "sampler": "vllm", "train": "none"}
    assert [lock_devices(config_of(**options)) for options in ({"device": "cpu"}, only)] == [[], []]
    assert not place.exists()
    with pytest.raises(ConfigError, match=r"memory_share=0.5 limits the memory of a GPU, and the models run on cpu"):
        lock_devices(config_of(**only, memory_share=0.5))


VLLM = {"sampler": "vllm"}
ONLY = {"sampler": "vllm", "train": "none"}


@pytest.mark.parametrize(
    ("options", "locked"),
    [
        ({}, [0]),
        ({"device": "cuda:2"}, [2]),
        (VLLM, [0, 1]),
        (VLLM | {"vllm_servers": 4}, [0, 1, 2, 3]),  # the last one shares the trainer's
        (VLLM | {"device": "cuda:2"}, [2, 3]),
        (VLLM | {"base_models": ["a=x/a", "b=x/b"]}, [0, 1, 2]),
        (VLLM | {"vllm_turn_s": 5}, [0]),
        (VLLM | {"vllm_urls": ["unix:x"]}, [0]),
        (VLLM | {"workers": 2, "device": "cuda:0"}, [0, 2]),  # the first of two workers, and the second
        ({"sampler": "none", "workers": 2, "device": "cuda:1"}, [1]),
        (ONLY | {"device": "cuda:1", "vllm_tensor_parallel": 2}, [1, 2]),
        (ONLY | {"vllm_urls": ["unix:x"]}, []),
    ],
)
def test_a_worker_locks_its_own_gpu_and_those_of_the_servers_that_it_starts(
    four_gpus: None, options: dict[str, object], locked: list[int], place: Path
) -> None:
    """Once each: a server that shares the worker's does not wait for it."""
    with working(**options) as count:
        assert sorted(int(file.stem.removeprefix("GPU-")) for file in place.glob("*.lock")) == locked
        assert count == len(locked)
        for gpu in locked:
            assert f"cuda:{gpu} (a GPU) is used by another server" in is_refused(device=f"cuda:{gpu}", memory_share=0.5)
    with working(**options) as count:
        assert count == len(locked)


def test_vllm_servers_share_a_gpu_with_another_server_if_both_have_a_share(four_gpus: None) -> None:
    trainer, alone = {"device": "cuda:1"}, ONLY | {"device": "cuda:1"}
    with (
        working(**VLLM, memory_share=0.4),
        working(**trainer, memory_share=0.5),
        working(**alone, memory_share=0.4) as count,
    ):
        assert count == 1
        assert all("cuda:1 (a GPU) is used by another server" in is_refused(**other) for other in (trainer, alone))


def test_a_worker_that_is_refused_one_of_its_gpus_keeps_none(four_gpus: None) -> None:
    with working(device="cuda:2"):
        assert "cuda:2 (a GPU) is used by another server" in is_refused(**VLLM, vllm_servers=3)
        assert all(is_free(f"GPU-{gpu}") for gpu in (0, 1, 3))


@pytest.mark.parametrize("kind", ["link", "open directory", "file"])
def test_nobody_else_reads_or_writes_where_locks_lie_and_a_place_that_is_not_the_users_alone_is_refused(
    place: Path, kind: str
) -> None:
    assert is_free()
    (file,) = place.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (place, file)] == [0o700, 0o600]
    elsewhere = place.rename(place.parent / "elsewhere")  # a directory that would do
    file = elsewhere / file.name
    file.unlink()
    if kind == "link":
        place.symlink_to(elsewhere)
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{re.escape(str(place))}, which holds the locks of GPUs, .*; remove it"):
        lock(GPU, "cuda:0", shared=True)
    assert not file.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_the_directory_of_somebody_else_is_refused(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 4711, 4711)
    with pytest.raises(ConfigError, match=r"must be this user's \(it belongs to user 4711\)"):
        lock(GPU, "cuda:0", shared=True)


def test_a_uuid_names_a_file_and_no_path() -> None:
    with pytest.raises(ConfigError, match="can name no file"):
        lock("../GPU", "cuda:0", shared=False)
