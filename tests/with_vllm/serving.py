"""Servers that sample with vLLM, in small."""

import os
import re
import time
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from tests.running import Server, serving

PYTHON = Path(os.environ.get("TINSMITH_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
"""Of the environment that vLLM is installed in."""

ON_GPU = os.environ.get("TINSMITH_TEST_DEVICE") == "cuda"
"""Whether trainer and vLLM use GPUs, or share one: `TINSMITH_TEST_DEVICE=cuda pytest tests/with_vllm/test_bfloat16.py`."""

READY_S = 1000.0
"""How long a vLLM server may take to start on a busy machine."""


def sampling_with_vllm(directory: Path, *options: str) -> AbstractContextManager[Server]:
    """A server with vLLM servers in small."""
    small = ("--max-context", "1024", "--kv-cache-gib", "1", "--max-lora-rank", "32", "--max-running", "64")
    shares = ("--memory-share", "0.4", "--vllm-arg=--gpu-memory-utilization=0.3")  # some tests start a second server on the same GPU
    where = ("--device", "cuda", *shares) if ON_GPU else ("--device", "cpu")
    return serving(directory, "--sampler", "vllm", "--vllm-python", str(PYTHON), *small, *where, *options)


def client_of(socket: str) -> httpx.Client:
    """A client of a vLLM server."""
    transport = httpx.HTTPTransport(uds=socket.removeprefix("unix:"), verify=False, trust_env=False)  # reading certificates takes long
    return httpx.Client(transport=transport, trust_env=False, base_url="http://vllm", timeout=60)


def asked_at(socket: str, path: str) -> httpx.Response:
    """What a vLLM server answers to a GET."""
    with client_of(socket) as vllm:
        return vllm.get(path)


def generated(socket: str) -> float:
    """Tokens that the vLLM server has sampled so far."""
    counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)", asked_at(socket, "/metrics").text, re.MULTILINE)
    return sum(float(count) for count in counts)


def wait_for_vllm(server: Server) -> str:
    """The address of its newest vLLM server, as soon as one is ready. Fails with the server's last words as soon as one ends instead."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.process.poll() is None:
        told = server.log.read_text()
        if ready := re.findall(r"vLLM server at (\S+) is ready", told):
            return str(ready[-1])
        if "a vLLM server ended" in told or "a vLLM server was killed" in told or "a vLLM server cannot be started" in told:
            break
        time.sleep(0.1)
    raise AssertionError(server.log.read_text())


def vllm_pids(server: Server) -> list[int]:
    """The vLLM servers that the worker has started, among its children. On a GPU PyTorch starts one too, which compiles."""
    threads = Path(f"/proc/{server.worker_pid()}/task").iterdir()
    children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in children if b"inside_vllm.launcher" in _command_of(pid)]


def _command_of(pid: int) -> bytes:
    """The command of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def processes_of(group: int) -> list[int]:
    """All processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
    return found


def engine_of(group: int) -> int:
    """The process of a vLLM server that schedules, among those of its group."""
    return _named(group, b"EngineCore")


def workers_of(group: int) -> tuple[int, int]:
    """The two workers of a vLLM server that divides its model over two processes, by rank."""
    return _named(group, b"Worker_TP0"), _named(group, b"Worker_TP1")


def _named(group: int, name: bytes) -> int:
    return next(pid for pid in processes_of(group) if name in _command_of(pid))
