"""Memory that really runs out, in a process of its own whose address space is limited."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="limits the memory of the CPU")

LIMIT = """
import ctypes, resource, sys
import torch
from pathlib import Path
from tests.bases import datum, load, random_tokens, renderer, write_decoder
from tests.training.test_backend import backend_with, gradients
from tests.training.test_full import SETTINGS, full_backend, step_all
from tinsmith.errors import TinsmithError
from tinsmith.models.full import training_bytes
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.checkpoint import read_state, write_state

torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back to the system, so that no limit finds room in it
unlimited = resource.getrlimit(resource.RLIMIT_AS)

def leave(spare):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, unlimited[1]))
"""

PASSES = """
base = load(Path(sys.argv[1]), device="cpu")
backend, render = backend_with(base, a=4, b=8), renderer(base)
backend.config.logits_chunk = 64
work = [datum("ab"[i % 2], render.render([random_tokens(i, 512)]), i) for i in range(8)]
for item in work:
    backend.run_pass([item], backward=True)
expected = {name: gradients(backend, name) for name in "ab"}

def run_short_of_memory(work):
    for spare in (32, 16, 8, 4, 2, 1, 0):  # MiB
        backend.tokens_per_pass = 8192
        for name in backend.optimizers:
            backend.clear_gradients(name)
        leave(spare * 2**20)
        outcome = backend.run_pass(work, backward=True)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        if outcome.failures or backend.tokens_per_pass < 8192:
            return outcome.failures

assert run_short_of_memory(work) == {}
assert backend.tokens_per_pass <= 2048
for name in "ab":
    for got, want in zip(gradients(backend, name), expected[name]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * max(1.0, want.abs().max().item()))
print(run_short_of_memory([datum("a", render.render([random_tokens(0, 8000)]))])[0])
"""

MODELS = """
base = load(Path(sys.argv[1]), device="cpu")
backend = full_backend(base, "first")
needed = training_bytes(backend.optimizers["first"].weights.parameter_count, base.dtype)
write_state(backend.copy_state("first", optimizer=False), Path(sys.argv[2]))
leave(backend.optimizers["first"].unclaimed + needed // 2)
for make in (
    lambda: backend.create_model("second", LoraShape(0, 0)),
    lambda: backend.restore("second", read_state(Path(sys.argv[2]), base)),
):
    try:
        make()
    except TinsmithError as error:
        print(error)
assert list(backend.optimizers) == ["first"]
backend.restore("first", read_state(Path(sys.argv[2]), base))  # what it holds itself is enough
first = backend.optimizers["first"]
leave(first.unclaimed + first.weights.nbytes // 2)
try:
    backend.copy_state("first", optimizer=False)
except TinsmithError as error:
    print(error)
"""

STEP = """
# So many rows that no memory freed before has room for the moments of the embedding.
write_decoder("qwen3", Path(sys.argv[2]), vocab_size=200_000, num_hidden_layers=1, tie_word_embeddings=True)
base = load(Path(sys.argv[2]), device="cpu")
backend = full_backend(base, "starved", "fed")
work = [datum(name, renderer(base).render([random_tokens(0, 9)])) for name in ("starved", "fed")]
backend.run_pass(work[:1], backward=True)
before = [tensor.clone() for tensor in backend.optimizers["starved"].weights.tensors()]
leave(2**24)
try:
    backend.optim_step("starved", SETTINGS)
except TinsmithError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, unlimited)
starved, fed = (backend.optimizers[name] for name in ("starved", "fed"))
assert all(torch.equal(a, b) for a, b in zip(before, starved.weights.tensors(), strict=True))
assert (starved.gradients, starved.moments()) == (None, {})
step_all(backend, work)
assert all(torch.equal(a, b) for a, b in zip(fed.weights.tensors(), starved.weights.tensors(), strict=True))
"""


@pytest.fixture
def say(family_dir: Callable[[str], Path], tmp_path: Path) -> Callable[[str], list[str]]:
    """What a script prints that has the directory of a model and one of its own, and fails at none of its assertions."""

    def run(script: str) -> list[str]:
        command = [sys.executable, "-c", LIMIT + script, str(family_dir("qwen3")), str(tmp_path / "own")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    return run


def test_a_pass_is_split_and_gives_the_same_gradients_and_what_can_never_fit_is_refused(say: Callable[[str], list[str]]) -> None:
    """Passes with less and less memory: 8 x 512 tokens, then one sequence of 8000, until one is too large."""
    (refused,) = say(PASSES)
    assert "a sequence of 8000 tokens needs more memory than cpu has left" in refused


def test_a_step_without_memory_changes_nothing_and_the_model_goes_on(say: Callable[[str], list[str]]) -> None:
    (refused,) = say(STEP)
    cleared = "the step was refused, the gradients are cleared and the weights stay as they were: it needs more memory than cpu"
    assert refused.startswith(cleared)


def test_models_that_do_not_fit_beside_the_others_are_refused_with_both_numbers(say: Callable[[str], list[str]]) -> None:
    pattern = re.compile(r"^(.+) needs (\S+) GiB of memory on cpu, of which (\S+) GiB are free; ")
    said = [found.groups() for found in map(pattern.match, say(MODELS)) if found]
    assert [purpose for purpose, *_ in said] == ["full-parameter training of tiny"] * 2 + ["the copy that is saved"]
    for (_, needed, free), share in zip(said, (0.5, 0.3, 0.5), strict=True):  # a limit of addresses counts the mapped masters too
        assert float(free) / float(needed) == pytest.approx(share, abs=0.1)
