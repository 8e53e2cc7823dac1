"""`python -m tinsmith.sampling.inside_vllm.launcher OPTIONS`: vLLM's API server, which ends with its parent.

Its standard input is a pipe from the process that started it. When the pipe is closed, the whole process group ends:
vLLM's workers too, which would outlive a killed parent. One that is stopped goes on for that when its parent has ended.
vLLM starts its workers with this file as their main module, so nothing but definitions stands at its top level.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_GRACE_S = 5.0
"""Seconds that vLLM may take to end by itself."""

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the thread that started it has ended."""

_ALWAYS_SO_BEFORE = ("--enable-scale-out", "--no-mm-device-do-normalize")
"""Options that vLLM 0.26 does not know: it does what they say without being asked."""


def end_with_parent() -> None:
    """End this process group when standard input closes: first politely, so that vLLM frees its shared memory."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # not SIGKILL, which would spare the rest of the group
    threading.Thread(target=watch, daemon=True).start()


def serve() -> None:
    """Run vLLM's API server with the options of this process."""
    if _vllm_version() >= (0, 32):
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
    else:
        sys.argv[1:] = [option for option in sys.argv[1:] if option not in _ALWAYS_SO_BEFORE]
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _vllm_version() -> tuple[int, ...]:
    import vllm

    return tuple(int(part) for part in vllm.__version__.split(".")[:2])


if __name__ == "__main__":
    # A group, to end all that vLLM starts. Not a session: where the scheduler groups processes by session, vLLM's
    # starved ours for seconds.
    os.setpgrp()
    end_with_parent()
    serve()
