"""Log-probabilities of target tokens from hidden states, without ever holding all logits.

    logprobs[t, k] = z[t, target[t, k]] - logsumexp(z[t]),   z = h W^T + scale (h A^T) B^T

Logits exist for `chunk` rows at a time, in the forward pass and again in the backward pass, which recomputes them from the hidden states;
where all rows of a pass are one chunk, what the forward pass computed is kept. With g the gradient of the logprobs,
dz[t] = Σ_k g[t, k] (onehot(target[t, k]) - softmax(z[t])).
Rows without gradient are skipped. Peak memory does not grow with vocabulary times tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.models.base import LM_HEAD
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter, Segment


def target_logprobs(hidden: Tensor, lm_head: Tensor, targets: Tensor, segments: list[Segment], chunk: int, keep: bool = False) -> Tensor:
    """Log-probabilities [tokens, K] in float32 of `targets` [tokens, K], each segment with its own LoRA on the LM head.

    `keep` those of the whole vocabulary, [tokens, vocabulary], for the backward pass, if there are no more than `chunk` rows.
    hidden [tokens, hidden]; lm_head [vocabulary, hidden]; differentiable in `hidden`, `lm_head` and the adapters' working copies.
    """
    compute: Any = _TargetLogprobs.apply
    parts = []
    for segment in segments:
        rows = slice(segment.start, segment.end)
        part: Tensor = compute(hidden[rows], lm_head, *head_lora(segment.adapter), targets[rows], chunk, keep)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def head_lora(owner: Weights | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A, B and scale of an adapter's LM head; (None, None, 0) where there is none."""
    if not isinstance(owner, Adapter) or LM_HEAD not in owner.working:
        return None, None, 0.0
    return (*owner.working[LM_HEAD], owner.scale)


def head_logits(hidden: Tensor, lm_head: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    """Logits [tokens, vocabulary] in float32."""
    logits = linear(hidden, lm_head)
    if a is not None and b is not None:
        logits.addmm_(linear(hidden, a), b.t(), alpha=scale)
    return logits.float()


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, a: Tensor | None, b: Tensor | None, scale: float, targets: Tensor, chunk: int, keep: bool
    ) -> Tensor:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        every = None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            every = head_logits(hidden[rows], lm_head, a, b, scale).log_softmax(-1)
            logprobs[rows] = every.gather(-1, targets[rows])
        ctx.save_for_backward(hidden, lm_head, a, b, targets, every if keep and len(hidden) <= chunk else None)
        ctx.scale, ctx.chunk = scale, chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, a, b, targets, every = ctx.saved_tensors
        (grad,) = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_a = torch.zeros_like(a) if a is not None else None
        grad_b = torch.zeros_like(b) if b is not None else None
        wanted = grad.ne(0).any(-1).nonzero().squeeze(-1)
        for rows in wanted.split(ctx.chunk):
            h = hidden[rows]
            g = grad[rows]
            logprobs = head_logits(h, lm_head, a, b, ctx.scale).log_softmax(-1) if every is None else every[rows]
            dz = logprobs.exp_().mul_(-g.sum(-1, keepdim=True))
            dz = dz.scatter_add_(-1, targets[rows], g).to(hidden.dtype)
            dh = dz @ lm_head
            if a is not None and b is not None and grad_a is not None and grad_b is not None:
                du = (dz @ b) * ctx.scale
                grad_b += dz.t() @ (linear(h, a) * ctx.scale)
                grad_a += du.t() @ h
                dh += du @ a
            if grad_head is not None:
                grad_head += dz.t() @ h
            grad_hidden[rows] = dh
        grad_head = grad_head.to(lm_head.dtype) if grad_head is not None else None
        return grad_hidden, grad_head, grad_a, grad_b, None, None, None, None
