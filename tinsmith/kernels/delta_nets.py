"""Decides whether gated delta nets run on our own Triton kernels, which serve bfloat16 on CUDA.

First they compute a small row, forward and backward. Where they fail or differ from our PyTorch code, that code takes
their place.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from subprocess import SubprocessError

import torch
from torch import Tensor
from torch.nn.functional import conv1d, logsigmoid, silu

from tinsmith.kernels.compiled import compile_ahead
from tinsmith.kernels.delta_chunks import chunks_of, delta_rule_in_chunks
from tinsmith.kernels.dispatch import SERVED, has_triton, on_kernels

Convolution = Callable[[Tensor, Tensor, tuple[int, ...], Tensor | None], Tensor]
"""`convolution` of `kernels/convolution.py`."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Tensor | None, bool], tuple[Tensor, Tensor]]
"""`delta_rule` of `kernels/delta_rule.py`."""
CHUNK = 64
"""Tokens of a chunk of the delta rule."""
STATE_BYTES = 2**30
"""Most bytes of the states before all chunks of heads computed together, which bounds the memory of a long row."""
MOST_APART = 0.05
"""Maximum distance of the kernels' results from float32, as a share of their norm. bfloat16 keeps numbers to 0.4 %."""
TRIED_LENGTHS, TRIED_HEADS, TRIED_WIDTH, TRIED_TAPS = (70, 130), 2, 128, 4
"""The row tried: tokens of each sequence, heads of queries and keys, width of each head, convolution taps."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeltaKernels:
    """The functions that launch the kernels."""

    convolution: Convolution
    delta_rule: Rule
    serves: Callable[[Tensor, Tensor], bool]
    """Whether `delta_rule` computes heads like these keys and values [tokens, heads, width]."""


def kernels_for(x: Tensor) -> DeltaKernels | None:
    """The kernels, if they serve tensors like `x`."""
    return _load(x.device)[0] if on_kernels("delta_rule", x) else None


def announce(device: torch.device, dtype: torch.dtype) -> None:
    """Log once what computes the gated delta nets of a model."""
    if device.type != "cuda":
        return
    if dtype not in SERVED["delta_rule"]:
        log.info("gated delta nets run on our PyTorch code: the kernels serve bfloat16, not %s", dtype)
        return
    kernels, wrong = _load(device)
    if kernels is None:
        log.warning("gated delta nets run on our PyTorch code, which is many times slower than our kernels: %s", wrong)
    else:
        log.info("gated delta nets run on our Triton kernels")


@torch.enable_grad()
def convolution_disagreement(convolution: Convolution, device: torch.device, dtype: torch.dtype) -> str:
    """Describe where `convolution` differs from PyTorch, forward or backward; empty if nowhere."""
    generator, tokens, channels = torch.Generator().manual_seed(0), sum(TRIED_LENGTHS), TRIED_HEADS * TRIED_WIDTH
    x, weight, d_out = (
        torch.randn(n, channels, generator=generator).to(device, dtype) for n in (tokens, TRIED_TAPS, tokens)
    )
    theirs = [x.requires_grad_(), weight.t().contiguous().requires_grad_()]
    ours = [tensor.detach().float().requires_grad_() for tensor in theirs]
    found = convolution(theirs[0], theirs[1], TRIED_LENGTHS, None)
    padded = (torch.nn.functional.pad(row.t(), (TRIED_TAPS - 1, 0)) for row in ours[0].split(TRIED_LENGTHS))
    expected = torch.cat([silu(conv1d(row, ours[1].unsqueeze(1), groups=channels)).t() for row in padded])
    gradients = torch.autograd.grad(found, theirs, d_out), torch.autograd.grad(expected, ours, d_out.float())
    return _first_apart(
        ["outputs", "gradients of x", "gradients of weight"], [found, *gradients[0]], [expected, *gradients[1]]
    )


@torch.enable_grad()
def disagreement(rule: Rule, device: torch.device, dtype: torch.dtype) -> str:
    """Describe where `rule` differs from our PyTorch code, forward or backward; empty if nowhere."""
    generator, tokens = torch.Generator().manual_seed(0), sum(TRIED_LENGTHS)

    def random(*heads_and_width: int) -> Tensor:
        return torch.randn(tokens, *heads_and_width, generator=generator)

    inputs = {
        "query": random(TRIED_HEADS, TRIED_WIDTH),
        "key": random(TRIED_HEADS, TRIED_WIDTH),
        "value": random(2 * TRIED_HEADS, TRIED_WIDTH),
        "decay": logsigmoid(random(2 * TRIED_HEADS)),
        "beta": torch.sigmoid(random(2 * TRIED_HEADS)),
    }
    theirs = [x.to(device, torch.float32 if name == "decay" else dtype).requires_grad_() for name, x in inputs.items()]
    ours = [x.detach().float().requires_grad_() for x in theirs]
    d_out = random(2 * TRIED_HEADS, TRIED_WIDTH).to(device, dtype)
    query, key, value, decay, beta = theirs
    found = rule(query, key, value, decay, beta, TRIED_LENGTHS, None, True)
    query, key, value, decay, beta = ours
    expected = delta_rule_in_chunks(query, key, value, decay, beta, chunks_of(TRIED_LENGTHS, TRIED_WIDTH, device), None)
    gradients = torch.autograd.grad(found[0], theirs, d_out), torch.autograd.grad(expected[0], ours, d_out.float())
    names = ["outputs", "states", *(f"gradients of {name}" for name in inputs)]
    return _first_apart(names, [*found, *gradients[0]], [*expected, *gradients[1]])


def _first_apart(names: list[str], found: list[Tensor], expected: list[Tensor]) -> str:
    for name, one, other in zip(names, found, expected, strict=True):
        apart = float((one.detach().float() - other.detach()).norm() / other.detach().norm())
        if not apart <= MOST_APART:  # NaN neither
            return f"its {name} are {apart:.2g} of their norm from those of our PyTorch code"
    return ""


@cache
def _load(device: torch.device) -> tuple[DeltaKernels | None, str]:
    """The kernels, or None and why they cannot be used."""
    if not has_triton():
        return None, "Triton is not installed"
    convolution = import_module("tinsmith.kernels.convolution").convolution
    rules = import_module("tinsmith.kernels.delta_rule")

    def try_both() -> list[str]:
        rule = disagreement(rules.delta_rule, device, torch.bfloat16)
        return [rule, convolution_disagreement(convolution, device, torch.bfloat16)]

    try:
        compile_ahead("delta rule", try_both)
        wrong = next((wrong for wrong in try_both() if wrong), "")
    # They are compiled here
    except (RuntimeError, OSError, SubprocessError, import_module("triton.errors").TritonError) as error:
        wrong = f"they fail here: {error!r}"
    return (None, wrong) if wrong else (DeltaKernels(convolution, rules.delta_rule, rules.serves), "")
