"""Log-probabilities of target tokens from hidden states, and their gradient, without holding all logits in float32.

    logprobs[t, k] = z[t, target[t, k]] - logsumexp(z[t]),   z = h W^T + scale (h A^T) B^T
    dz[t] = Σ_k g[t, k] (onehot(target[t, k]) - softmax(z[t])),   with g the gradient of the logprobs

All models of a row share one multiplication by the LM head W; each adapter's own part is added to its slice of the
rows. The caller says which rows may have a gradient, and these come first: their logits, or some of them, stay in the
precision of the base until the backward pass, which writes dz in their place. All other logits exist for `chunk` rows
at a time, and those of rows that have a gradient are computed again in the backward pass. A row without gradient gets
exactly 0. Peak memory does not grow with vocabulary times tokens.

In half precision the softmax is computed in float32 from the rounded logits and rounded once more, as dz; on a GPU that
is one kernel forward and one backward (`kernels/logits.py`). In float32 what is kept is log_softmax(z).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import with_kernel
from tinsmith.models.deterministic import stable_logits
from tinsmith.models.full import Weights
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, Segment

PIECE, GPU_PIECE = 2**24, 2**27
"""Logits that are turned into probabilities at a time; on a GPU more, so that few kernels do it."""


class HeadPart(NamedTuple):
    """Rows [start, end) to which the adapter number `adapter` of the pass adds its part of the LM head."""

    start: int
    end: int
    scale: float
    adapter: int


@dataclass(frozen=True, eq=False)
class _Rows:
    """The order in which the rows of a pass are computed."""

    order: Tensor | None
    """[tokens] int64: the place of each in the row, first those that may have a gradient; None to keep the order."""
    wanted: int
    """Number of rows that may have a gradient."""
    kept: int
    """Number of these whose logits stay in memory until the backward."""
    chunk: int
    """Number of other rows whose logits are in memory at a time."""
    parts: list[HeadPart]
    """Parts of the LM head in this order."""

    def take(self, values: Tensor) -> Tensor:
        return values if self.order is None else values.index_select(0, self.order)

    def stretches(self, start: int, end: int) -> Iterator[slice]:
        """Yield rows [start, end) of this order, as many at a time as may have logits."""
        for first in range(start, end, self.chunk):
            yield slice(first, min(first + self.chunk, end))

    def parts_within(self, rows: slice) -> list[HeadPart]:
        """Cut the parts of adapters to a stretch of rows."""
        within = [
            HeadPart(
                max(part.start, rows.start) - rows.start,
                min(part.end, rows.stop) - rows.start,
                part.scale,
                part.adapter,
            )
            for part in self.parts
        ]
        return [part for part in within if part.start < part.end]


def rows_to_keep(chunk: int, dtype: torch.dtype) -> int:
    """Number of rows whose logits can stay in memory until the backward, if `chunk` rows are computed at a time.

    In half precision four times as many: they take the memory of `chunk` rows' float32 logits and probabilities.
    """
    return chunk if dtype.itemsize >= 4 else 4 * chunk


def target_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    segments: list[Segment],
    chunk: int,
    keep: int = 0,
    wanted: NDArray[np.bool_] | None = None,
) -> Tensor:
    """Log-probabilities [tokens, K] in float32 of `targets` [tokens, K], each segment with its own LoRA on the LM head.

    Logits of `chunk` rows are computed at a time; those of up to `keep` rows stay for the one backward pass, which
    computes in their place. `wanted` [tokens] says which rows may have a gradient; None means all.

    hidden [tokens, hidden]; lm_head [vocabulary, hidden]; differentiable in both and the adapters' working copies.
    """
    parts: list[HeadPart] = []
    matrices: list[Tensor] = []
    for segment in segments:
        a, b, scale = head_lora(segment.adapter)
        if a is not None and b is not None:
            parts.append(HeadPart(segment.start, segment.end, scale, len(parts)))
            matrices += (a, b)
    rows = _ordered(parts, len(hidden), chunk, keep, wanted, hidden.device)
    compute: Any = _TargetLogprobs.apply
    logprobs: Tensor = compute(hidden, lm_head, targets, rows, *matrices)
    return logprobs


def _ordered(
    parts: list[HeadPart], tokens: int, chunk: int, keep: int, wanted: NDArray[np.bool_] | None, device: torch.device
) -> _Rows:
    """Order rows, the wanted ones first, on the host: nobody waits for the device."""
    if not torch.is_grad_enabled():
        return _Rows(None, 0, 0, chunk, parts)
    count = tokens if wanted is None else int(wanted.sum())
    if wanted is None or count == tokens:
        return _Rows(None, tokens, min(keep, tokens), chunk, parts)
    order = np.concatenate([np.flatnonzero(wanted), np.flatnonzero(~wanted)])
    before = np.concatenate([[0], np.cumsum(wanted)])  # [tokens + 1] how many of the first rows are wanted
    moved = [part._replace(start=int(before[part.start]), end=int(before[part.end])) for part in parts]
    others = [
        part._replace(start=count + part.start - first.start, end=count + part.end - first.end)
        for part, first in zip(parts, moved, strict=True)
    ]
    return _Rows(upload(order, device), count, min(keep, count), chunk, moved + others)


@torch.no_grad()
def stable_target_logprobs(
    hidden: Tensor, lm_head: Tensor, targets: Tensor, segments: Sequence[Segment], chunk: int
) -> Tensor:
    """Values of `target_logprobs`, each a function of its own hidden state alone (`models/deterministic.py`)."""
    found = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    for segment in segments:
        for start in range(segment.start, segment.end, chunk):
            rows = slice(start, min(start + chunk, segment.end))
            logits = head_logits(hidden[rows], lm_head, *head_lora(segment.adapter), stable=True)
            logprobs = (logits - logits.amax(-1, keepdim=True)).log_softmax(-1)
            found[rows] = logprobs.gather(-1, targets[rows])
    return found


def head_lora(owner: Weights | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A, B and scale of an adapter's LM head; (None, None, 0) where there is none."""
    if not isinstance(owner, Adapter) or LM_HEAD not in owner.working:
        return None, None, 0.0
    return (*owner.working[LM_HEAD], owner.scale)


def head_logits(
    hidden: Tensor, lm_head: Tensor, a: Tensor | None, b: Tensor | None, scale: float, stable: bool = False
) -> Tensor:
    """Logits [tokens, vocabulary] in float32 of one model; if `stable`, each row depends on itself alone to the bit."""
    if stable:
        return stable_logits(hidden, lm_head, a, b, scale).float()
    parts, matrices = ([HeadPart(0, len(hidden), scale, 0)], (a, b)) if a is not None and b is not None else ([], ())
    return _logits(hidden, lm_head, parts, matrices).float()


def _logits(hidden: Tensor, lm_head: Tensor, parts: Sequence[HeadPart], matrices: Sequence[Tensor]) -> Tensor:
    """Logits [tokens, vocabulary] in the precision of the base; `matrices` are A and B of each adapter."""
    logits = linear(hidden, lm_head)
    for part in parts:
        a, b = matrices[2 * part.adapter], matrices[2 * part.adapter + 1]
        rows = slice(part.start, part.end)
        logits[rows].addmm_(linear(hidden[rows], a), b.t(), alpha=part.scale)
    return logits


class _Distribution:
    """Distributions of rows over the vocabulary, replaced by their gradient after log-probabilities were read."""

    def __init__(self, logits: Tensor) -> None:
        """Take over `logits` [rows, vocabulary]."""
        self.half = logits.dtype.itemsize < 4
        self.logits = logits if self.half else logits.log_softmax(-1)
        self.norms: list[tuple[Tensor, Tensor]] = (
            [logit_norms(piece) for piece in self._pieces(logits)] if self.half else []
        )

    def _pieces(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split something that has as many rows as the logits."""
        pieces: tuple[Tensor, ...] = values.split(
            max(1, (GPU_PIECE if values.is_cuda else PIECE) // self.logits.shape[1])
        )
        return pieces

    def logprobs(self, targets: Tensor) -> Tensor:
        """[rows, K] float32 of `targets` [rows, K]."""
        found = self.logits.gather(-1, targets).float()
        if not self.half:
            return found
        peaks, totals = (torch.cat(part) for part in zip(*self.norms, strict=True))  # [rows, 1] each
        return found.sub_(peaks).sub_(totals)

    def gradient(self, targets: Tensor, grad: Tensor) -> Tensor:
        """Turn the logits [rows, vocabulary] into their gradient, from `grad` [rows, K] of the targets' logprobs."""
        norms = iter(self.norms)
        for logits, t, g in zip(self._pieces(self.logits), self._pieces(targets), self._pieces(grad), strict=True):
            if self.half and t.shape[1] == 1:
                become_gradient(logits, *next(norms), t, g)
                continue
            wide = _logprobs_of(logits, *next(norms)) if self.half else logits
            # In float32: close to 1, a probability rounds badly
            dz = wide.exp_().mul_(-g.sum(-1, keepdim=True)).scatter_add_(-1, t, g)
            # Where logits are no numbers, 0 times them is none either
            dz.masked_fill_(g.eq(0).all(-1, keepdim=True), 0.0)
            if self.half:
                logits.copy_(dz)
        return self.logits


@with_kernel("logits")
def logit_norms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, and logarithm of the sum of exp(logit - largest): [rows, 1] each, in float32."""
    wide = logits.float()
    peak = wide.amax(-1, keepdim=True)
    return peak, (wide - peak).exp().sum(-1, keepdim=True).log()


@with_kernel("logits")
def become_gradient(logits: Tensor, peak: Tensor, total: Tensor, target: Tensor, grad: Tensor) -> None:
    """Replace logits [rows, vocabulary] by grad · (onehot(target) - softmax), or 0 where grad is 0.

    The other tensors are [rows, 1].
    """
    chosen = torch.arange(logits.shape[1], device=logits.device) == target  # [rows, vocabulary]
    dz = (torch.where(chosen, 1.0, 0.0) - (logits.float() - peak - total).exp()) * grad
    logits.copy_(torch.where(grad == 0, 0.0, dz))


def _logprobs_of(logits: Tensor, peak: Tensor, total: Tensor) -> Tensor:
    return logits.float().sub_(peak).sub_(total)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, rows: _Rows, *matrices: Tensor) -> Tensor:
        h, t = rows.take(hidden), rows.take(targets)
        scored = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        for stretch in (*rows.stretches(rows.wanted, len(h)), *rows.stretches(rows.kept, rows.wanted)):
            scored[stretch] = _distribution(h, lm_head, rows, stretch, matrices).logprobs(t[stretch])
        ctx.kept = None
        if rows.kept:  # last, when the logits of no other rows are in memory
            ctx.kept = _distribution(h, lm_head, rows, slice(0, rows.kept), matrices)
            scored[: rows.kept] = ctx.kept.logprobs(t[: rows.kept])
        ctx.save_for_backward(h, lm_head, t, *matrices)
        ctx.rows = rows
        return scored if rows.order is None else torch.empty_like(scored).index_copy_(0, rows.order, scored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, lm_head, t, *matrices = ctx.saved_tensors
        rows: _Rows = ctx.rows
        g = rows.take(grads[0])
        dh = torch.zeros_like(h)
        sums: list[Tensor | None] = [None] * (1 + len(matrices))  # of lm_head, and of A and B of each adapter
        stretches = [slice(0, rows.kept)] if rows.kept else []
        stretches += rows.stretches(rows.kept, rows.wanted)
        for stretch in stretches:
            found = _distribution(h, lm_head, rows, stretch, matrices) if ctx.kept is None else ctx.kept
            ctx.kept = None
            dz = found.gradient(t[stretch], g[stretch])
            torch.mm(dz, lm_head, out=dh[stretch])
            if ctx.needs_input_grad[1]:
                _add(sums, 0, dz.t() @ h[stretch], len(stretches))
            for part in rows.parts_within(stretch):
                a, b = matrices[2 * part.adapter], matrices[2 * part.adapter + 1]
                mine = slice(stretch.start + part.start, stretch.start + part.end)
                own = dz[part.start : part.end]
                du = (own @ b).mul_(part.scale)  # [rows of the part, rank]
                _add(sums, 1 + 2 * part.adapter, du.t() @ h[mine], len(stretches))
                u = linear(h[mine], a).mul_(part.scale)
                # On a CPU twice as fast as its transpose
                _add(sums, 2 + 2 * part.adapter, (u.t() @ own).t(), len(stretches))
                dh[mine].addmm_(du, a)
        dh.masked_fill_(g.eq(0).all(-1, keepdim=True), 0.0)  # a logit may be infinite where its gradient is 0
        of_weights = [
            total.to(weight.dtype) if total is not None else torch.zeros_like(weight) if needed else None
            for total, weight, needed in zip(
                sums, (lm_head, *matrices), (ctx.needs_input_grad[1], *ctx.needs_input_grad[4:]), strict=True
            )
        ]
        grad_hidden = dh if rows.order is None else torch.empty_like(dh).index_copy_(0, rows.order, dh)
        return grad_hidden, of_weights[0], None, None, *of_weights[1:]


def _distribution(h: Tensor, lm_head: Tensor, rows: _Rows, stretch: slice, matrices: Sequence[Tensor]) -> _Distribution:
    return _Distribution(_logits(h[stretch], lm_head, rows.parts_within(stretch), matrices))


def _add(sums: list[Tensor | None], place: int, found: Tensor, summands: int) -> None:
    """Add `found` to one of the sums, in float32 if there are several summands."""
    total = sums[place]
    if total is None:
        sums[place] = found if summands == 1 else found.float()
    else:
        total += found
