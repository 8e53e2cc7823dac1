"""Divides the work of one base model into passes (`step.py`).

A pass that finds too little memory recomputes more of itself (`memory/retries.py`). One that fails in any other way, or
still, is halved until the datum is found that fails.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, EngineUnavailableError, GivenUpError
from tinsmith.memory.pass_memory import Recomputation, pass_memory_of
from tinsmith.memory.retries import MemoryRetries, PassFailure, attempted
from tinsmith.models.base import threads_for
from tinsmith.models.lora import Adapter
from tinsmith.rendering.packing import shared_rows
from tinsmith.training.compact import Optimizer
from tinsmith.training.losses import DatumResult, DatumWork
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.step import run_packed

log = logging.getLogger(__name__)

Outcome = list[DatumResult] | PassFailure


@dataclass(frozen=True)
class PassResult:
    """Outcome of each datum: a result, or a failure that left no gradient."""

    results: list[DatumResult | None]
    """Results in the order of the work; None for a datum that failed."""
    failures: dict[int, str]
    """Reasons of failures, by index in the work."""


class PassRunner:
    """Computes work of the models of one base."""

    def __init__(
        self, memory: ModelMemory, config: TrainingConfig, optimizers: Mapping[str, Optimizer], sharded: bool = False
    ) -> None:
        self.base = memory.base
        self.memory = memory
        self.config = config
        self.optimizers = optimizers
        self.tokens_per_pass = config.tokens_per_pass
        """Most tokens of one pass. It falls when memory runs out."""
        taken = pass_memory_of(self.base.layout, self.base.text_config, self.base.dtype, sharded)
        self.memory_retries = MemoryRetries(
            taken, self.base.device, config.logits_chunk, memory.promised, memory.give_back
        )
        self._look: Callable[[], None] | None = None
        """Callback of the current pass, called between layers."""

    def run(self, work: Sequence[DatumWork], backward: bool, look: Callable[[], None] | None = None) -> PassResult:
        """Compute logprobs and losses of all datums, in as many passes as it takes; `backward` accumulates gradients.

        `look` is called between layers and may raise GivenUpError to end the pass, of which some gradients may stay.
        Work that fails is halved until a single datum fails, because it is bad or needs more memory than there is.
        """
        self._look = look
        results: list[DatumResult | None] = [None] * len(work)
        failures = {
            i: not_loaded(datum.model_id) for i, datum in enumerate(work) if datum.model_id not in self.optimizers
        }
        there = [i for i in range(len(work)) if i not in failures]
        passes = deque(self._rows(work, there, backward))
        while passes:
            chosen = passes.popleft()
            part = [work[i] for i in chosen]
            outcome = self._compute(part, backward)
            if not isinstance(outcome, PassFailure):
                for i, result in zip(chosen, outcome, strict=True):
                    results[i] = result
            elif len(chosen) == 1:
                needs = (
                    f"a sequence of {len(part[0].rendered)} tokens needs more memory than {self.base.device} has left: "
                )
                failures[chosen[0]] = f"the pass failed: {needs if outcome.out_of_memory else ''}{outcome.reason}"
            else:
                if outcome.out_of_memory:
                    self._plan_smaller_passes(part)
                first = _half(part)
                passes.extendleft((chosen[first:], chosen[:first]))
        if self.tokens_per_pass < self.config.tokens_per_pass and self.memory_retries.may_grow():
            self.tokens_per_pass = min(2 * self.tokens_per_pass, self.config.tokens_per_pass)
            log.info("no pass ran out of memory for a while: they take up to %d tokens again", self.tokens_per_pass)
        return PassResult(results, failures)

    def _rows(self, work: Sequence[DatumWork], there: Sequence[int], backward: bool) -> list[list[int]]:
        """Return rows as indices: models share one if they can, unless a graph for each alone takes less time."""
        rows = [
            [there[place] for place in row]
            for row in shared_rows([self.optimizers[work[i].model_id].weights for i in there], self.base.layout)
        ]
        fitting = [
            [row[place] for place in places]
            for row in rows
            for places in self.memory.pager.fitting([self.optimizers[work[i].model_id] for i in row])
        ]
        return [part for row in fitting for part in (self._apart(work, row) if backward else [row])]

    def _apart(self, work: Sequence[DatumWork], row: list[int]) -> list[list[int]]:
        models: dict[str, list[int]] = {}
        for i in row:
            models.setdefault(work[i].model_id, []).append(i)
        if len(models) == 1 or any(work[i].rendered.images for i in row):
            return [row]
        texts: list[tuple[list[int], Adapter]] = []
        for model, own in models.items():
            weights = self.optimizers[model].weights
            if isinstance(weights, Adapter):
                texts.append(([len(work[i].rendered) for i in own], weights))
        if len(texts) == len(models) and self.memory.captured.are_faster_apart(texts):
            return list(models.values())
        return [row]

    def _compute(self, work: Sequence[DatumWork], backward: bool) -> Outcome:
        """Compute one pass, with as much recomputation as it takes to fit into the memory, or without other models."""
        tokens = sum(len(datum.rendered) for datum in work)
        pager, optimizers = self.memory.pager, [self.optimizers[datum.model_id] for datum in work]
        attempt: Callable[[Recomputation], Outcome] = partial(self._attempt, work, backward)
        while True:
            lacking = attempted(partial(pager.bring, optimizers))
            outcome: Outcome | None = lacking
            if outcome is None:
                outcome = self.memory_retries.run(attempt, tokens, backward, alone=len(work) == 1)
            if not (isinstance(outcome, PassFailure) and outcome.out_of_memory and pager.leave_only(optimizers)):
                return outcome

    def _attempt(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> Outcome:
        """Compute one pass; an error is returned, so that a failed pass frees its tensors before the next starts."""
        # The last two errors are of looking for what was dropped meanwhile.
        raised = (DeviceLostError, GivenUpError, EngineUnavailableError)
        return attempted(partial(self._run, work, backward, recomputation), *raised, traceback=len(work) == 1)

    def _run(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> list[DatumResult]:
        tokens = sum(len(datum.rendered) for datum in work)
        optimizers, captured = [self.optimizers[datum.model_id] for datum in work], self.memory.captured
        # Gradients of full weights are not in the estimate, and would be most of what is measured. Graphs take nothing.
        counts = (
            backward
            and not captured.may_have(tokens)
            and all(optimizer.weights.shape.rank > 0 for optimizer in optimizers)
        )
        with (
            threads_for(self.base, tokens),
            self.memory_retries.measured(tokens, recomputation) if counts else nullcontext(),
        ):
            return run_packed(
                self.base, work, optimizers, backward, self.config.logits_chunk, recomputation, self._look, captured
            )

    def _plan_smaller_passes(self, work: Sequence[DatumWork]) -> None:
        """Plan later passes no larger than half of this work, for which the memory did not suffice."""
        total = sum(len(datum.rendered) for datum in work)
        self.tokens_per_pass = max(1, min(self.tokens_per_pass, total // 2))
        log.warning(
            "out of memory in a pass of %d tokens: it goes on in two, later ones take %d tokens",
            total,
            self.tokens_per_pass,
        )


def not_loaded(model_id: str) -> str:
    """Say that a model is not here, as its client reads it."""
    return f"model {model_id} is not loaded; create it anew"


def _half(work: Sequence[DatumWork]) -> int:
    """Return the index that cuts work into two parts of about equal tokens, neither of them empty."""
    before = np.cumsum([0, *(len(datum.rendered) for datum in work)])
    return min(max(1, int((before[:-1] < before[-1] / 2).sum())), len(work) - 1)
