"""A pass over prompts: pieces of them are computed, and the tokens that follow complete ones are chosen."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.models.base import BaseModel, threads_for
from tinsmith.models.full import Weights
from tinsmith.rendering.packing import pack, packing_order, segments_of, shared_rows
from tinsmith.sampling.choose import choose
from tinsmith.sampling.local.cached_attention import CachedPlan
from tinsmith.sampling.local.decoding import Drawn
from tinsmith.sampling.local.outcomes import SequenceOutcomes, by_job, caught
from tinsmith.sampling.local.schedule import PromptWindows, Schedule
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.sampler import SampleEvent
from tinsmith.training.logprobs import head_logits, head_lora

PARTS = 4
"""The layers of a pass are computed in so many parts, between which running sequences take steps."""


class PromptPasses:
    """Computes the passes over prompts of one sampler."""

    def __init__(self, base: BaseModel, schedule: Schedule, outcomes: SequenceOutcomes, logits_chunk: int) -> None:
        """Logits exist for `logits_chunk` positions at a time where questions about a prompt are answered."""
        self.base = base
        self.schedule = schedule
        self.outcomes = outcomes
        self.logits_chunk = logits_chunk

    def run(self, windows: PromptWindows, between: Callable[[], list[SampleEvent]]) -> list[SampleEvent]:
        """Compute the windows in a pass, and append the tokens that follow.

        `between` is called between parts of the layers.

        If the pass fails each job is computed in one of its own, so that only jobs fail that cannot be computed.
        """
        events: list[SampleEvent] = []
        alone: PromptWindows = []
        with caught(partial(self.outcomes.retreat, "a pass", windows, windows, alone)):
            self._pass(windows, between, events)
            return events
        torch.cuda.empty_cache()
        for own in by_job((sequence, (sequence, window)) for sequence, window in alone):
            job = own[0][0].job
            if not job.failed:  # in the middle of the pass of all; then its blocks are given back
                with caught(partial(self.outcomes.fail, job, events)):
                    self._pass(own, between, events)
        return events

    def _pass(
        self, windows: PromptWindows, between: Callable[[], list[SampleEvent]], events: list[SampleEvent]
    ) -> None:
        with self.outcomes.failures_kept():
            drawn = self._compute(windows, lambda: events.extend(between()))
        events += self.outcomes.append(drawn)

    def _compute(self, windows: PromptWindows, between: Callable[[], None]) -> list[Drawn]:
        """Choose the tokens that follow the windows.

        No sequence and no state changes before all of that has succeeded.
        """
        with torch.no_grad(), threads_for(self.base, sum(len(window) for _, window in windows)):
            self.schedule.cache.clean()
            ready: list[SequenceState] = []
            logits: list[Tensor] = []
            plans: list[CachedPlan] = []
            for group in shared_rows([sequence.job.weights for sequence, _ in windows], self.base.layout):
                complete, behind, plan = self._row([windows[i] for i in group], between)
                ready += complete
                logits.append(behind)
                plans.append(plan)
            samples = [s.job.sequences if s.starts_job else [s] for s in ready]
            growing = [s for group in samples for s in group]
            following = choose(
                _for_each(_joined(logits), [len(group) for group in samples]), [s.choice() for s in growing]
            )
            forks = self.schedule.forks(windows)
            for plan in plans:
                plan.commit()
            self.schedule.computed(windows, forks)
        return [(s, c.token, c.logprob, c.top if s.job.topk else None) for s, c in zip(growing, following, strict=True)]

    def _row(
        self, windows: PromptWindows, between: Callable[[], None]
    ) -> tuple[list[SequenceState], Tensor, CachedPlan]:
        """Compute a row of windows, whose plan is returned last and not committed yet.

        Returns the sequences that are computed to their end, and the logits [sequences, vocabulary] there.
        """
        order = packing_order([len(window) for _, window in windows], [s.job.weights for s, _ in windows])
        windows = [windows[i] for i in order]
        row = pack(
            [s.part(window.start, window.end) for s, window in windows],
            [s.job.weights for s, _ in windows],
            self.base.device,
        )
        plan = CachedPlan(
            self.schedule.cache, [window for _, window in windows], self.schedule.states, self.base.deterministic
        )
        part = -(-len(self.base.layout.layers) // PARTS)  # layers
        hidden = self.base.hidden_states(
            row, plan, before_layer=lambda layer: between() if layer and layer % part == 0 else None
        )
        ready, last, start = [], [], 0
        for sequence, window in windows:
            if sequence.job.scores:
                head = partial(self._head_logits, sequence.job.weights)
                sequence.job.scores.add(window.start, hidden[start : start + len(window)], head, self.logits_chunk)
            start += len(window)
            if window.end == sequence.length:
                ready.append(sequence)
                last.append(start - 1)
        rows = upload(np.array(last, dtype=np.int64), hidden.device)
        return ready, self._logits(hidden[rows], [s.job.weights for s in ready]), plan

    def _logits(self, hidden: Tensor, owners: Sequence[Weights | None]) -> Tensor:
        """[sequences, vocabulary] float32, each with the LM head of its owner; owners may share a row."""
        parts = [
            self._head_logits(owners[s.start], hidden[s.start : s.end]) for s in segments_of([1] * len(owners), owners)
        ]
        return _joined(parts) if parts else torch.empty(0, self.base.vocab_size, device=hidden.device)

    def _head_logits(self, weights: Weights | None, hidden: Tensor) -> Tensor:
        return head_logits(hidden, self.base.head(weights), *head_lora(weights), stable=self.base.deterministic)


def _joined(parts: list[Tensor]) -> Tensor:
    """Join the rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _for_each(rows: Tensor, counts: list[int]) -> Tensor:
    """Repeat row i counts[i] times; nothing is copied if all counts are 1."""
    return rows if len(rows) == sum(counts) else rows.repeat_interleave(torch.tensor(counts, device=rows.device), dim=0)
