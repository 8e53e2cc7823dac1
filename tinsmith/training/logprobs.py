"""Log-probabilities of target tokens from hidden states, without ever holding all logits.

    logprobs[t, k] = z[t, target[t, k]] - logsumexp(z[t]),   z = h W^T + scale (h A^T) B^T

All models of a row share one multiplication by the LM head W; each adapter's own part is added to its slice of the rows. Logits exist for
`chunk` rows at a time, in the forward pass and again in the backward pass, which recomputes them from the hidden states; where all rows are
one chunk, what the forward pass computed is kept. With g the gradient of the logprobs,
dz[t] = Σ_k g[t, k] (onehot(target[t, k]) - softmax(z[t])).
Rows without gradient are skipped, or get exactly 0. Peak memory does not grow with vocabulary times tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.models.full import Weights
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, Segment


class HeadPart(NamedTuple):
    """Rows [start, end) whose adapter has a part of the LM head."""

    start: int
    end: int
    scale: float


def target_logprobs(hidden: Tensor, lm_head: Tensor, targets: Tensor, segments: list[Segment], chunk: int, keep: bool = False) -> Tensor:
    """Log-probabilities [tokens, K] in float32 of `targets` [tokens, K], each segment with its own LoRA on the LM head.

    `keep` those of the whole vocabulary, [tokens, vocabulary], for the backward pass, if there are no more than `chunk` rows. That pass
    computes in their place, so there can be only one.
    hidden [tokens, hidden]; lm_head [vocabulary, hidden]; differentiable in `hidden`, `lm_head` and the adapters' working copies.
    """
    parts: list[HeadPart] = []
    matrices: list[Tensor] = []
    for segment in segments:
        a, b, scale = head_lora(segment.adapter)
        if a is not None and b is not None:
            parts.append(HeadPart(segment.start, segment.end, scale))
            matrices += (a, b)
    compute: Any = _TargetLogprobs.apply
    logprobs: Tensor = compute(hidden, lm_head, targets, parts, chunk, keep, *matrices)
    return logprobs


def head_lora(owner: Weights | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A, B and scale of an adapter's LM head; (None, None, 0) where there is none."""
    if not isinstance(owner, Adapter) or LM_HEAD not in owner.working:
        return None, None, 0.0
    return (*owner.working[LM_HEAD], owner.scale)


def head_logits(hidden: Tensor, lm_head: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    """Logits [tokens, vocabulary] in float32 of one model's rows."""
    parts, matrices = ([HeadPart(0, len(hidden), scale)], (a, b)) if a is not None and b is not None else ([], ())
    return _logits(hidden, lm_head, parts, matrices)


def _logits(hidden: Tensor, lm_head: Tensor, parts: list[HeadPart], matrices: Sequence[Tensor]) -> Tensor:
    """Logits [tokens, vocabulary] in float32; `matrices` are A and B of each part."""
    logits = linear(hidden, lm_head)
    for part, a, b in zip(parts, matrices[::2], matrices[1::2], strict=True):
        rows = slice(part.start, part.end)
        logits[rows].addmm_(linear(hidden[rows], a), b.t(), alpha=part.scale)
    return logits.float()


def _parts_within(parts: list[HeadPart], rows: slice | Tensor) -> list[HeadPart]:
    """The parts as they lie among the chosen rows: a stretch, or ascending indices. One that has no row there is empty."""
    if isinstance(rows, slice):
        bounds = [[min(max(bound, rows.start), rows.stop) - rows.start for bound in part[:2]] for part in parts]
    else:
        bounds = torch.searchsorted(rows, torch.tensor([part[:2] for part in parts], device=rows.device)).tolist() if parts else []
    return [HeadPart(start, end, part.scale) for (start, end), part in zip(bounds, parts, strict=True)]


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, parts: list[HeadPart], chunk: int, keep: bool, *matrices: Tensor
    ) -> Tensor:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        every = None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, min(start + chunk, len(hidden)))
            every = _logits(hidden[rows], lm_head, _parts_within(parts, rows), matrices).log_softmax(-1)
            logprobs[rows] = every.gather(-1, targets[rows])
        ctx.save_for_backward(hidden, lm_head, targets, every if keep and len(hidden) <= chunk else None, *matrices)
        ctx.parts, ctx.chunk = parts, chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, targets, every, *matrices = ctx.saved_tensors
        (grad,) = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        found = [torch.zeros_like(matrix) for matrix in matrices]
        wanted = grad.ne(0).any(-1)
        for rows in _chosen(wanted, ctx.chunk, every is not None):
            h, t, g = hidden[rows], targets[rows], grad[rows]
            parts = _parts_within(ctx.parts, rows)
            logprobs = _logits(h, lm_head, parts, matrices).log_softmax(-1) if every is None else every[rows]
            dz = logprobs.exp_().mul_(-g.sum(-1, keepdim=True)).scatter_add_(-1, t, g)
            if isinstance(rows, slice):
                dz.index_fill_(0, (~wanted).nonzero().squeeze(-1), 0.0)  # where logits are no numbers, 0 times them is none either
            dz = dz.to(hidden.dtype)
            dh = dz @ lm_head
            _add_lora_gradients(found, dh, dz, h, parts, matrices)
            if grad_head is not None:
                grad_head += dz.t() @ h
            grad_hidden[rows] = dh
        grad_head = grad_head.to(lm_head.dtype) if grad_head is not None else None
        return grad_hidden, grad_head, None, None, None, None, *found


def _chosen(wanted: Tensor, chunk: int, kept: bool) -> Sequence[slice | Tensor]:
    """The rows that have a gradient, `chunk` at a time. Of kept logits all are taken if most are wanted: to pick some is to copy them."""
    indices = wanted.nonzero().squeeze(-1)
    if kept and 2 * len(indices) > len(wanted):
        return [slice(0, len(wanted))]
    pieces: tuple[Tensor, ...] = indices.split(chunk)
    return pieces


def _add_lora_gradients(found: list[Tensor], dh: Tensor, dz: Tensor, h: Tensor, parts: list[HeadPart], matrices: Sequence[Tensor]) -> None:
    """Add to `found` the gradients of A and B of each part, and to dh what comes through them; dz is the gradient of the logits."""
    for part, a, b, grad_a, grad_b in zip(parts, matrices[::2], matrices[1::2], found[::2], found[1::2], strict=True):
        rows = slice(part.start, part.end)
        du = (dz[rows] @ b).mul_(part.scale)
        grad_b += (linear(h[rows], a).mul_(part.scale).t() @ dz[rows]).t()  # on a CPU twice as fast as its transpose
        grad_a += du.t() @ h[rows]
        dh[rows].addmm_(du, a)
