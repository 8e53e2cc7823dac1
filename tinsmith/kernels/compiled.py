"""Compiles our Triton kernels in threads before they are needed, keeps the results on disk and counts them.

One behind the other, kernels would take a minute at the first start. So the code that will launch them runs once as a
rehearsal, in which nothing is launched: it only says which variants of kernels it needs.
"""

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from tinsmith.errors import TinsmithError
from tinsmith.kernels.dispatch import has_triton
from tinsmith.observing.metrics import WORKER_TIME

THREADS = 16
"""Variants that are compiled at a time, at most; as many as the machine has processors, if these are fewer."""
UNWRITTEN = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
"""Functions whose tensors hold zeros in a rehearsal, as no kernel writes them: indices and tokens that exist."""
UNFIT = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, TinsmithError)
"""Errors of a rehearsal: it computes on zeros, and Triton may not compile in threads. A real launch raises its own."""

log = logging.getLogger(__name__)


def compile_ahead(what: str, rehearse: Callable[[], object]) -> None:
    """Compile the kernels that `rehearse` launches on CUDA, unless the cache has them for `what`.

    What `rehearse` computes means nothing. Where it fails, kernels are compiled when they are needed.
    """
    done = _marker(what)
    if done is not None and done.exists():
        return
    began = time.monotonic()
    try:
        with WORKER_TIME.during("compiling"), _rehearsal() as variants:
            rehearse()
    except UNFIT as error:
        log.info("kernels are compiled when they are needed, which takes longer: a rehearsal failed: %s", error)
        return
    failed = [future.exception() for future in variants if future.exception() is not None]
    log.info("compiled %d variants of kernels, %.1f s", len(variants) - len(failed), time.monotonic() - began)
    if failed:
        log.warning("%d more could not be compiled ahead; the first: %s", len(failed), failed[0])
    elif done is not None:
        with suppress(OSError):  # a cache that cannot be written to: the next start rehearses again
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()


def _marker(what: str) -> Path | None:
    """The file that says that kernels for `what` lie in the cache beside it; None if there is no cache of ours."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    known = [
        what,
        torch.__version__,
        import_module("triton").__version__,
        torch.cuda.get_device_name(),
        digest_of_sources(),
    ]
    return Path(kept) / "rehearsed" / hashlib.sha256("\n".join(known).encode()).hexdigest()[:16] if kept else None


@cache
def digest_of_sources() -> str:
    """SHA-256 of Tinsmith's own code, which what was compiled or checked depends on."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        total.update(f"{file.relative_to(package)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@contextmanager
def _rehearsal() -> Iterator[list[Future[Any]]]:
    """Compile the variants of kernels that the body would launch; nothing is launched. Yields a future for each."""
    kernel, contexts = import_module("triton.runtime.jit").JITFunction, import_module("triton.runtime._async_compile")
    launch = kernel.run
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        compiler = import_module("triton").AsyncCompileMode(
            _Loading(threads, torch.cuda.current_device()), ignore_errors=True
        )

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            token = contexts.active_mode.set(compiler)  # of this thread: backwards run in threads of their own
            try:
                return launch(self, *args, grid=grid, warmup=True, **kwargs)
            finally:
                contexts.active_mode.reset(token)

        kept = [(owner, name, getattr(owner, name)) for owner, name in UNWRITTEN]
        kernel.run = compile_only
        for owner, name, function in kept:
            setattr(owner, name, _zeroed(function))
        try:
            with compiler:
                yield compiler.raw_futures
        finally:
            kernel.run = launch
            for owner, name, function in kept:
                setattr(owner, name, function)


class _Loading(Executor):
    """Threads that load what they have compiled: some versions of Triton compile the launch only then."""

    def __init__(self, threads: Executor, device: int) -> None:
        self.threads = threads
        self.device = device

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return self.threads.submit(self._loaded, compile_kernel)

    def _loaded(self, compile_kernel: Callable[[], Any]) -> Any:
        torch.cuda.set_device(self.device)  # each thread has to say which
        kernel = compile_kernel()
        try:
            _ = kernel.run  # made when it is first asked for
        except (RuntimeError, OSError, SubprocessError) as error:  # what fails now may succeed, or fail, at the launch
            log.debug("%s is loaded when it is launched: %s", kernel.name, error)
            kernel._run = None  # it is set before all is loaded
        return kernel


def _zeroed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def zeros(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs).zero_()

    return zeros


def keep_kernels(directory: str) -> None:
    """Keep compiled kernels in a directory for the next process; "" is one in the user's cache.

    A set variable stays.
    """
    kept = Path(directory or "~/.cache/tinsmith/compiled").expanduser()
    os.environ.setdefault("TRITON_CACHE_DIR", str(kept / "triton"))


_variants: Counter[str] = Counter()
"""Variants of our kernels that are ready, by name."""


def count_kernels() -> None:
    """Count the variants of kernels from now on: one for each combination of constants, precisions and alignments."""
    if not has_triton():
        return
    hooks = import_module("triton.knobs").runtime
    if getattr(hooks, "jit_post_compile_hook", "not in this version") is None:  # somebody else's stays
        hooks.jit_post_compile_hook = _count_kernel


def _count_kernel(*, fn: Any, **others: Any) -> None:
    """Count a variant that Triton has compiled or found in its cache."""
    _variants[fn.name] += 1
    log.debug("kernel %s: variant number %d is ready", fn.name, _variants[fn.name])


def compilations() -> int:
    """Return the number of kernel variants of this process.

    If it keeps growing, kernels are compiled again and again.
    """
    return _variants.total()
