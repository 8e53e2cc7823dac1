"""Servers that sample with vLLM, in small."""

import os
import re
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.running import Server, serving

PYTHON = Path(os.environ.get("TINSMITH_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
"""Of the environment that vLLM is installed in."""

ON_GPU = os.environ.get("TINSMITH_TEST_DEVICE") == "cuda"
"""Whether trainer and vLLM use or share GPUs: `TINSMITH_TEST_DEVICE=cuda pytest tests/with_vllm/test_bfloat16.py`."""

READY_S = 1000.0
"""How long a vLLM server may take to start on a busy machine."""


def sampling_with_vllm(directory: Path, *options: str) -> AbstractContextManager[Server]:
    """A server with vLLM servers in small."""
    small = ("--max-context", "1024", "--kv-cache-gib", "1", "--max-lora-rank", "32", "--max-running", "64")
    # Some tests start a second server on the same GPU
    shares = ("--memory-share", "0.4", "--vllm-arg=--gpu-memory-utilization=0.3")
    where = ("--device", "cuda", *shares) if ON_GPU else ("--device", "cpu")
    return serving(directory, "--sampler", "vllm", "--vllm-python", str(PYTHON), *small, *where, *options)


def client_of(socket: str) -> httpx.Client:
    """A client of a vLLM server."""
    # Reading certificates takes long
    transport = httpx.HTTPTransport(uds=socket.removeprefix("unix:"), verify=False, trust_env=False)
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
    """The address of its newest vLLM server, as soon as one is ready.

    Fails with the server's last words as soon as one ends instead.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.process.poll() is None:
        told = server.log.read_text()
        if ready := re.findall(r"vLLM server at (\S+) is ready", told):
            return str(ready[-1])
        if re.search("a vLLM server (ended|was killed|cannot be started)", told):
            break
        time.sleep(0.1)
    raise AssertionError(server.log.read_text())


def vllm_pids(server: Server) -> list[int]:
    """The vLLM servers that the worker has started, among its children.

    On a GPU PyTorch starts one too, which compiles.
    """
    children = psutil.Process(server.worker_pid()).children()
    return [child.pid for child in children if any("inside_vllm.launcher" in word for word in child.cmdline())]


def processes_of(group: int) -> list[int]:
    """All processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):  # it ended while we looked
            if os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


def process_of(group: int, name: str) -> int:
    """A process of a vLLM server: EngineCore schedules; Worker_TP0 and Worker_TP1 divide a model."""
    members = processes_of(group)
    commands = {process.pid: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    return next(pid for pid in members if name in commands.get(pid, ""))


def wait_until_gone(group: int) -> None:
    """Wait until a process group has no process any more."""
    deadline = time.monotonic() + READY_S
    while processes_of(group):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def write_changed(directory: Path, **changes: Any) -> None:
    """Write a tiny model anew with another text configuration: vLLM's kernels for a CPU do not take all sizes."""
    config = AutoConfig.from_pretrained(directory)
    for name, value in changes.items():
        setattr(
            config.text_config, name, getattr(config.text_config, name) | value if isinstance(value, dict) else value
        )
    torch.manual_seed(0)
    network: Any = AutoModelForImageTextToText.from_config(config)
    network.get_decoder().norm.weight.data.fill_(4.0)
    network.save_pretrained(directory)
