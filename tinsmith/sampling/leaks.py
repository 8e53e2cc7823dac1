"""Checks that sequences of a packed row do not reach each other, forward and backward. A part of the self-check.

Every second sequence of a row is a neighbour of the others, and then the other way round:

    forward     other tokens of neighbours leave the log-probabilities of a sequence as they are
    backward    the loss of a sequence has no gradient in its neighbours' tokens, and in its own tokens and its adapter
                the gradient that
                it has alone
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.rendering.packing import pack, packing_order
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.tower_check import EXACT, refuse
from tinsmith.training.logprobs import target_logprobs

CHUNK = 64
"""Rows of logits that exist at a time."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A random sequence, and the adapter that it runs with."""

    rendered: RenderedInput
    adapter: Adapter | None


def packed_logprobs(base: BaseModel, probes: Sequence[Probe]) -> list[Tensor]:
    """Compute the log-probabilities [n - 1] of each probe's own next tokens in one packed row."""
    order = row_order(probes)
    chosen = [probes[i] for i in order]
    row = pack([p.rendered for p in chosen], [p.adapter for p in chosen], base.device)
    hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype, routes=row.routes))
    scored = target_logprobs(hidden, base.lm_head, row.token_ids.roll(-1).unsqueeze(-1), row.segments, CHUNK).squeeze(
        -1
    )
    by_probe = dict(zip(order, scored.split(row.lengths), strict=True))
    return [by_probe[i][:-1] for i in range(len(probes))]


def row_order(probes: Sequence[Probe]) -> list[int]:
    """Return the order of the probes in their packed row."""
    return packing_order([len(p.rendered) for p in probes], [p.adapter for p in probes])


def check_leaks(base: BaseModel, probes: Sequence[Probe], quick: bool = False) -> None:
    """Raise ConfigError if sequences of a packed row affect each other; `quick` checks only every second one."""
    order = row_order(probes)
    packed = packed_logprobs(base, probes)
    exact = base.dtype == torch.float32
    alone = [gradients(base, [probe], [0]) for probe in probes] if exact else []
    for own in (order[1::2],) if quick else (order[::2], order[1::2]):
        changed = [probe if i in own else _shuffled(probe) for i, probe in enumerate(probes)]
        found = packed_logprobs(base, changed)
        refuse(
            "a sequence changes with the tokens of others in its packed row",
            max(_apart(found[i], packed[i]) for i in own),
            EXACT,
        )
        here = gradients(base, probes, own)
        others = [here.tokens[i] for i in range(len(probes)) if i not in own]
        refuse(
            "the loss of a sequence has gradients in others of its packed row",
            max(g.abs().max().item() for g in others),
            0.0,
        )
        if exact:
            _compare_gradients(probes, own, here, alone)


def _shuffled(probe: Probe) -> Probe:
    tokens, text = probe.rendered.token_ids.copy(), probe.rendered.is_text
    tokens[text] = np.roll(tokens[text], 1)
    return replace(probe, rendered=replace(probe.rendered, token_ids=tokens))


def _apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of a fixed random sum of log-probabilities."""

    tokens: list[Tensor]
    """Gradients of the embeddings of each probe's tokens [n, hidden]."""
    adapters: dict[int, Tensor]
    """Gradients of all matrices of an adapter [parameters], by its `id`."""


@torch.enable_grad()
def gradients(base: BaseModel, probes: Sequence[Probe], counted: Collection[int]) -> Gradients:
    """Pack all probes in one row; compute gradients of a fixed random sum of the logprobs of those in `counted`."""
    adapters = {id(probe.adapter): probe.adapter for probe in probes if probe.adapter is not None}
    with _embeddings(base) as embeddings:
        logprobs = packed_logprobs(base, probes)
    loss = torch.stack([(logprobs[i] * _direction(logprobs[i])).sum() for i in counted]).sum()
    leaves = [embeddings[0], *(leaf for adapter in adapters.values() for leaf in adapter.leaves())]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    first, *rest = (torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))
    order = row_order(probes)
    pieces = dict(zip(order, first.split([len(probes[i].rendered) for i in order]), strict=True))
    by_adapter = {}
    for key, adapter in adapters.items():
        count = len(adapter.leaves())
        by_adapter[key], rest = torch.cat([g.flatten().float() for g in rest[:count]]), rest[count:]
    return Gradients([pieces[i] for i in range(len(probes))], by_adapter)


def _direction(x: Tensor) -> Tensor:
    """Draw the same random numbers in the shape of x each time."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


@contextmanager
def _embeddings(base: BaseModel) -> Iterator[list[Tensor]]:
    """Collect the embeddings [tokens, hidden] of the passes inside, as leaves that gradients can be taken of."""
    kept: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    with base.language_model.get_input_embeddings().register_forward_hook(keep):
        yield kept


def _compare_gradients(
    probes: Sequence[Probe], own: Collection[int], found: Gradients, alone: Sequence[Gradients]
) -> None:
    """Raise ConfigError unless the probes `own` have the gradients in a row with others that they have alone."""
    pairs = [(found.tokens[i], alone[i].tokens[0]) for i in own]
    for key in {id(probes[i].adapter) for i in own if probes[i].adapter is not None}:
        mine = [alone[i].adapters[key] for i in own if id(probes[i].adapter) == key]
        pairs.append((found.adapters[key], torch.stack(mine).sum(0)))
    apart = max(_apart(got, expected) / max(expected.abs().max().item(), 1e-6) for got, expected in pairs)
    refuse("a sequence has other gradients in a packed row than alone", apart, EXACT)
