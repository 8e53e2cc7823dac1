"""Which kernels compute gated delta nets in half precision on CUDA, and how flash-linear-attention's are called.

The delta rule runs on our own Triton kernels in bfloat16 (`models/delta_rule_kernels.py`), elsewhere on flash-linear-attention's.
The convolution and single tokens run on flash-linear-attention's, if it is installed. float32 is computed by our PyTorch code.
flash-linear-attention refuses Triton 3.4 to 3.7.0 on Hopper GPUs, where its gradients would be wrong; then our PyTorch code serves what is
left. So it does where kernels do not agree with it: before they are first used they compute a small row, forward and backward.
"""

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tinsmith.models.delta_chunks import chunks_of, delta_rule_in_chunks
from tinsmith.models.device import has_triton, upload

INSTALL = "pip install 'tinsmith[fast-delta-nets]'"
Rule = Callable[..., tuple[Tensor, Tensor]]
"""Called as `DeltaKernels.delta_rule`."""
MOST_APART = 0.05
"""How far results of the kernels may lie from ours in float32, as a share of their norm. bfloat16 keeps numbers to 0.4 %."""
TRIED_LENGTHS, TRIED_HEADS, TRIED_WIDTH = (70, 130), 2, 128
"""Tokens of each sequence of the row that is tried, heads of queries and keys, and the width of all heads."""

log = logging.getLogger(__name__)


class DeltaKernels:
    """The kernels, called as `models/delta_rule.py` calls its own functions."""

    def __init__(self) -> None:
        """Raises ImportError where flash-linear-attention or Triton is not installed."""
        rule = import_module("fla.ops.gated_delta_rule")
        self._chunks: Any = rule.chunk_gated_delta_rule
        self._steps: Any = rule.fused_recurrent_gated_delta_rule
        self._convolve: Any = import_module("fla.modules.causal_conv1d").causal_conv1d

    def convolve(self, x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """`convolve` of sequences that begin here: [tokens, channels]."""
        bounds, on_cpu = _bounds(lengths, x.device)
        out: Tensor = self._convolve(x.unsqueeze(0), weight, activation="silu", cu_seqlens=bounds, cu_seqlens_cpu=on_cpu)[0]
        return out[0]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        lengths: tuple[int, ...],
        before: Tensor | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        """`gated_delta_rule`; the states are only computed if `keeps`."""
        bounds, on_cpu = _bounds(lengths, value.device)
        out, after = self._chunks(
            *(x.unsqueeze(0) for x in (query, key, value, decay, beta)),
            initial_state=before,
            output_final_state=keeps,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
            cu_seqlens_cpu=on_cpu,
        )
        return out[0], after

    def step(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each sequence, without gradients."""
        out, after = self._steps(
            *(x.unsqueeze(1) for x in (query, key, value)),
            g=decay.unsqueeze(1),
            beta=beta.unsqueeze(1),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[:, 0], after


@lru_cache(maxsize=16)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` [sequences + 1] int64, on the device and on the CPU. The layers of a pass share them."""
    bounds = np.cumsum([0, *lengths])
    return upload(bounds, device), torch.from_numpy(bounds)


def kernels_for(x: Tensor) -> DeltaKernels | None:
    """The kernels, if they serve tensors like `x`."""
    return _load(x.device, x.dtype)[0] if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) else None


def rule_for(key: Tensor, value: Tensor) -> Rule | None:
    """The kernels of the delta rule for such keys and values [tokens, heads, width]: ours, else flash-linear-attention's."""
    if value.is_cuda and value.dtype == torch.bfloat16:
        ours, serves, _ = _load_ours(value.device)
        if ours is not None and serves(key, value):
            return ours
    kernels = kernels_for(value)
    return None if kernels is None else kernels.delta_rule


def announce(device: torch.device, dtype: torch.dtype) -> None:
    """Log once what computes the gated delta nets of a model, and how to get what is faster."""
    if device.type != "cuda":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        log.info("gated delta nets run on our own PyTorch code: flash-linear-attention serves bfloat16, not %s", dtype)
        return
    ours, _, wrong = _load_ours(device) if dtype == torch.bfloat16 else (None, None, "they serve bfloat16")
    kernels, obstacle = _load(device, dtype)
    if ours is not None:
        log.info("the delta rule of gated delta nets runs on our own Triton kernels")
        if kernels is None:
            log.info("their convolution runs on our own PyTorch code, which is slower than flash-linear-attention: %s", obstacle)
    elif kernels is not None:
        log.info("gated delta nets run on the kernels of flash-linear-attention, not on ours: %s", wrong)
    else:
        log.warning(
            "gated delta nets run on our own PyTorch code, which is slower than kernels. Ours: %s; flash-linear-attention: %s",
            wrong,
            obstacle,
        )


@torch.enable_grad()
def disagreement(rule: Rule, device: torch.device, dtype: torch.dtype) -> str:
    """What `rule`, called as `DeltaKernels.delta_rule`, computes otherwise than our own code, forward or backward; empty if nothing."""
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
    found = rule(*theirs, TRIED_LENGTHS, None, True)
    query, key, value, decay, beta = ours
    expected = delta_rule_in_chunks(query, key, value, decay, beta, chunks_of(TRIED_LENGTHS, TRIED_WIDTH, device), None)
    gradients = torch.autograd.grad(found[0], theirs, d_out), torch.autograd.grad(expected[0], ours, d_out.float())
    names = ["outputs", "states", *(f"gradients of {name}" for name in inputs)]
    for name, one, other in zip(names, (*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        apart = float((one.detach().float() - other.detach()).norm() / other.detach().norm())
        if not apart <= MOST_APART:  # NaN neither
            return f"its {name} are {apart:.2g} of their norm from those of our own code"
    return ""


@cache
def _load(device: torch.device, dtype: torch.dtype) -> tuple[DeltaKernels | None, str]:
    """The kernels, or None and why they cannot be used for tensors of this kind."""
    try:
        kernels = DeltaKernels()
        utils = import_module("fla.utils")
    except ImportError as error:
        return None, f"it is not installed ({error}); {INSTALL}"
    if utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1:
        version = import_module("triton").__version__
        return None, f"it refuses Triton {version} on this GPU, where it would compute wrong gradients; PyTorch 2.13 brings Triton 3.7.1"
    try:
        wrong = disagreement(kernels.delta_rule, device, dtype)
    except (RuntimeError, OSError, SubprocessError, import_module("triton.errors").TritonError) as error:  # they are compiled here
        wrong = f"its kernels fail here: {error!r}"
    return (None, wrong) if wrong else (kernels, "")


@cache
def _load_ours(device: torch.device) -> tuple[Rule | None, Callable[[Tensor, Tensor], bool], str]:
    """Our own kernels for bfloat16 or None, which heads they serve, and why they cannot be used."""
    if not has_triton():
        return None, lambda _key, _value: False, "Triton is not installed"
    kernels = import_module("tinsmith.models.delta_rule_kernels")
    try:
        wrong = disagreement(kernels.delta_rule, device, torch.bfloat16)
    except (RuntimeError, OSError, SubprocessError, import_module("triton.errors").TritonError) as error:  # they are compiled here
        wrong = f"they fail here: {error!r}"
    return None if wrong else kernels.delta_rule, kernels.serves, wrong
