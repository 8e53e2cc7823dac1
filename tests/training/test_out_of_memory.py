"""Memory that really runs out, in a process of its own whose address space is limited."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="limits the memory of the CPU")

SCRIPT = """
import resource, sys
import numpy as np
import torch
from pathlib import Path
from tests.bases import datum, load, random_tokens, renderer
from tests.training.test_backend import backend_with, gradients

torch.set_num_threads(1)
base = load(Path(sys.argv[1]), device="cpu")
backend, render = backend_with(base, a=4, b=8), renderer(base)
backend.config.logits_chunk = 64
work = [datum("ab"[i % 2], render.render([random_tokens(i, 512)]), i) for i in range(8)]
for item in work:
    backend.run_pass([item], backward=True)
expected = {name: gradients(backend, name) for name in "ab"}
unlimited = resource.getrlimit(resource.RLIMIT_AS)

def run_short_of_memory(work):
    for spare in (32, 16, 8, 4, 2, 1, 0):  # MiB; how much a pass finds in memory that was freed before differs between machines
        backend.tokens_per_pass = 8192
        for name in backend.optimizers:
            backend.clear_gradients(name)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, unlimited[1]))
        outcome = backend.run_pass(work, backward=True)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        if outcome.failures or backend.tokens_per_pass < 8192:
            return outcome.failures

print("failures", run_short_of_memory(work))
print("limit", backend.tokens_per_pass)
for name in "ab":
    for got, want in zip(gradients(backend, name), expected[name]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * max(1.0, want.abs().max().item()))
print("gradients equal")
print("refused", run_short_of_memory([datum("a", render.render([random_tokens(0, 8000)]))]))
"""


@pytest.fixture(scope="module")
def said(family_dir: Callable[[str], Path]) -> dict[str, str]:
    """What the script printed about passes with less and less memory: 8 x 512 tokens, then one sequence of 8000, until one is too large."""
    command = [sys.executable, "-c", SCRIPT, str(family_dir("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_pass_that_runs_out_of_memory_is_split_and_gives_the_same_gradients(said: dict[str, str]) -> None:
    assert said["failures"] == "{}"
    assert said["gradients"] == "equal"
    assert int(said["limit"]) <= 2048


def test_what_can_never_fit_is_refused_with_its_size(said: dict[str, str]) -> None:
    assert "a sequence of 8000 tokens needs more memory than cpu has left" in said["refused"]
