"""`python -m tinsmith.vllm.launcher OPTIONS`: vLLM's API server, ended together with the process that started it.

Started by `tinsmith/vllm/servers.py` with a pipe as standard input. When the other end is closed, however the engine ended, the whole
process group goes: vLLM's own worker processes too, which outlive a killed parent.

vLLM starts its worker processes with this file as their main module, so what stands at its top level happens in each of them.
"""

import importlib.metadata
import os
import runpy
import signal
import sys
import threading
import time
from types import ModuleType
from typing import cast

_GRACE_S = 5.0
"""How long vLLM may take to end by itself."""

_ALWAYS_SO_BEFORE = ("--enable-scale-out", "--no-mm-device-do-normalize")
"""Options that vLLM 0.26 does not know, because it does what they say without being asked."""

_TORCHVISION_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def make_up_for_cuda_builds() -> None:
    """Let vLLM start where PyTorch is the CPU build, but torchvision, torchaudio and torchcodec are PyPI's, built for CUDA.

    vLLM's Qwen-VL models import torchvision's Python side, which describes operators at import and fails if they are not declared;
    nothing calls them. The other two are imported where they are found, so they must not be. Where the builds match, nothing happens here.
    """
    if not importlib.metadata.version("torch").endswith("+cpu"):
        return
    if _is_pypi_build("torchvision"):
        import torch

        for name, schema in _TORCHVISION_OPERATORS.items():
            torch.library.define(f"torchvision::{name}", schema)
    for name in ("torchaudio", "torchcodec"):
        if _is_pypi_build(name):
            sys.modules[name] = cast(ModuleType, None)  # what the import system takes for a module that is not there


def _is_pypi_build(distribution: str) -> bool:
    """Whether it is installed, in a version without a local part such as "+cpu"."""
    try:
        return "+" not in importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False


def end_with_parent() -> None:
    """End this process group as soon as standard input is closed: first politely, so that vLLM gives its shared memory back."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def serve() -> None:
    """VLLM's API server, with the options of this process."""
    if _vllm_version() >= (0, 32):
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
    else:
        sys.argv[1:] = [option for option in sys.argv[1:] if option not in _ALWAYS_SO_BEFORE]
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _vllm_version() -> tuple[int, ...]:
    import vllm

    return tuple(int(part) for part in vllm.__version__.split(".")[:2])


make_up_for_cuda_builds()

if __name__ == "__main__":
    # A group, to end all that vLLM starts. Not a session: where the scheduler groups processes by session, vLLM's starved ours for seconds.
    os.setpgrp()
    end_with_parent()
    serve()
