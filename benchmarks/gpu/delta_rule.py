"""The gated delta rule in bfloat16: errors against float64, and times, beside those of transformers' own code.

Parts:
- errors    of outputs and gradients, as shares of the norm, against our PyTorch code in float64, for several rows
- times     milliseconds of the forward, and of forward and backward with their peak GiB, of 32 value heads of 128

    python -m benchmarks.gpu.delta_rule --output benchmarks/results/delta-rule.txt
    TINY=1 TRITON_INTERPRET=1 python -m benchmarks.gpu.delta_rule
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, finish, isolated, peak_memory, release
from tinsmith.kernels.delta_chunks import chunks_of, delta_rule_in_chunks

WIDTH = 16 if TINY else 128
HEADS = (2, 2) if TINY else (16, 2)
"""Key heads, and value heads for each of them."""
NAMES = ("query", "key", "value", "decay", "beta")
ERRORS: dict[str, tuple[int, ...]] = (
    {"1x66": (66,)}
    if TINY
    else {
        "1x1": (1,),
        "1x63": (63,),
        "1x64": (64,),
        "1x65": (65,),
        "1x1000": (1000,),
        "mixed": (1, 63, 64, 65, 300, 2),
        "1x4096": (4096,),
    }
)
TIMES: dict[str, tuple[int, ...]] = (
    {"1x66": (66,)}
    if TINY
    else {
        "8x1024": (1024,) * 8,
        "1x8192": (8192,),
        "1x65536": (65536,),
        "128_ragged": tuple(1 + 37 * i % 127 for i in range(128)),
    }
)

Rule = Callable[..., tuple[Tensor, Tensor]]
"""Called as `tinsmith.kernels.delta_rule.delta_rule`."""


def kernels(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Our Triton kernels."""
    from tinsmith.kernels.delta_rule import delta_rule

    return delta_rule(*arguments)


def in_torch(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Our PyTorch code."""
    *tensors, lengths, before, keeps = arguments
    query, key, value, decay, beta = tensors
    return delta_rule_in_chunks(
        query, key, value, decay, beta, chunks_of(lengths, key.shape[2], value.device), before, keeps
    )


def transformers_own(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The PyTorch code of transformers, a sequence at a time."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    query, key, value, decay, beta, lengths, before, keeps = arguments
    groups = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(groups, 1) for x in (query, key))
    compute: Any = modeling_qwen3_next.torch_chunk_gated_delta_rule
    outs, afters = [], []
    for index, (start, end) in enumerate(pairwise([0, *accumulate(lengths)])):
        q, k, v, g, b = (x[start:end].unsqueeze(0) for x in (query, key, value, decay, beta))
        own = None if before is None else before[index : index + 1]
        out, after = compute(
            q, k, v, g=g, beta=b, initial_state=own, output_final_state=keeps, use_qk_l2norm_in_kernel=True
        )
        outs.append(out[0])
        afters.append(after)
    return torch.cat(outs), torch.cat(afters)


def inputs(lengths: Sequence[int], heads: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Query, key, value, decay, beta and states before, and the gradients of outputs and of the states behind."""
    generator, tokens, values = torch.Generator().manual_seed(0), sum(lengths), heads[0] * heads[1]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = [random(tokens, heads[0], WIDTH).bfloat16() for _ in range(2)]
    rest = [
        random(tokens, values, WIDTH).bfloat16(),
        logsigmoid(2 * random(tokens, values) + 2),
        random(tokens, values).sigmoid().bfloat16(),
    ]
    states = [random(len(lengths), values, WIDTH, WIDTH) for _ in range(2)]
    made = [x.to(DEVICE) for x in (*keys, *rest, states[0])]
    return made, random(tokens, values, WIDTH).bfloat16().to(DEVICE), states[1].to(DEVICE)


def errors(lengths: tuple[int, ...]) -> Figures:
    """Shares of the norm of each result of the kernels, and over those of transformers."""
    given, d_out, d_after = inputs(lengths, (HEADS[0] // 2, HEADS[1]) if sum(lengths) < 4096 else (2, 2))

    def results(rule: Rule, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in given]
        outs = rule(*leaves[:5], lengths, leaves[5], True)
        gradients = torch.autograd.grad(outs, leaves, [d_out.to(outs[0].dtype), d_after.to(outs[1].dtype)])
        return [x.detach().double() for x in (*outs, *gradients)]

    exact = results(in_torch, torch.float64)
    found: Figures = {}
    names = ("out", "after", *(f"d_{name}" for name in NAMES), "d_before")
    for name, ours, theirs, right in zip(
        names, results(kernels, None), results(transformers_own, None), exact, strict=True
    ):
        apart, other = (float((x - right).norm() / right.norm()) for x in (ours, theirs))
        found |= {name: apart, f"{name}_over_theirs": round(apart / max(other, 1e-30), 3)}
    return found


def times(rule: Rule, lengths: tuple[int, ...]) -> Figures:
    """Medians, without states."""
    given, d_out, _ = inputs(lengths, HEADS)
    leaves = [x.requires_grad_() for x in given[:5]]

    def forward() -> None:
        with torch.no_grad():
            rule(*leaves, lengths, None, False)

    def both() -> None:
        torch.autograd.grad(rule(*leaves, lengths, None, False)[0], leaves, d_out)

    found: Figures = {"forward_ms": _median_ms(forward)}
    release()
    held = peak_memory().get("gib", 0.0)
    return {**found, "both_ms": _median_ms(both), "gib": peak_memory().get("gib", 0.0) - held}


def _median_ms(action: Callable[[], None]) -> float:
    """Of calls in a second, at least three, after two that compile."""
    taken: list[float] = []
    for call in range(200):
        finish()
        start = time.perf_counter()
        action()
        finish()
        if call >= 2:
            taken.append(time.perf_counter() - start)
        if len(taken) >= 3 and sum(taken) > 1:
            break
    return 1000 * median(taken)


def main() -> None:
    """Measure what the command line asks for."""
    asked = begin(__doc__, ("errors", "times"), ("kernels", "torch", "transformers"))
    if "errors" in asked.parts:
        for name, lengths in ERRORS.items():
            isolated(f"errors/{name}", partial(errors, lengths), asked.budget)
    rules: dict[str, Rule] = {"kernels": kernels, "torch": in_torch, "transformers": transformers_own}
    for name, lengths in TIMES.items() if "times" in asked.parts else ():
        for side in asked.sides:
            isolated(f"times/{name}/{side}", partial(times, rules[side], lengths), asked.budget)


if __name__ == "__main__":
    main()
