"""One decoding step: the newest token of each row goes through the model, and the token that follows is drawn.

Nothing is read on the host and no shape depends on a value, so that a CUDA graph can capture it (`decode_graph.py`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tinsmith.kernels.dispatch import on_paged_kernel
from tinsmith.models.attention import stable_attention
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.batched_lora import BareRows, BatchedAdapters
from tinsmith.models.decoder import Decoder
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import LM_HEAD
from tinsmith.rendering.packing import segments_of
from tinsmith.sampling.choose import DeviceChoice, choose_next
from tinsmith.sampling.local.cached_attention import gathered_bytes, paged_attention, store_and_attend
from tinsmith.sampling.local.device_batch import (
    ADVANCE,
    COLUMNS,
    DRAWN,
    LENGTH,
    POSITION,
    SAMPLE,
    SEED,
    SLOT,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    DeviceBatch,
    write_places,
)
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.states import StatefulPlan, StateSlots, StateSteps, StepsInPlace
from tinsmith.training.logprobs import head_logits, head_lora

MOST_GATHERED = 2**28
"""Most bytes of copies of keys and values in a captured step, where no kernel reads them from the cache."""
NARROW = 16
"""Rows of up to so many blocks attend in one call: few large ones beat a little less padding."""

Together = tuple[Tensor | slice, int]
"""Rows that attend in one call, and the most blocks that one of them has."""


@dataclass(frozen=True, eq=False)
class StepRows:
    """Facts about the rows of one step that the host knows."""

    count: int
    truncates: bool
    needs_logits: bool
    """Whether a row wants its likeliest tokens, or has a shape."""
    has_adapters: bool
    groups: Sequence[Together]
    owner: Weights | None = None
    """Weights of all rows, where they have no columns; None for the base and adapters that have."""


class DecodePlan(StatefulPlan):
    """The `PassPlan` of one new token for each row."""

    def __init__(
        self,
        cache: KVCache,
        state: Tensor,
        table: Tensor,
        groups: Sequence[Together],
        steps: StateSteps | StepsInPlace | None,
        stable: bool,
    ) -> None:
        """If `stable`, attention is computed as in `models/attention.py`."""
        super().__init__(steps)
        self.cache = cache
        self.stable = stable
        self.state, self.table = state, table
        lengths = state[:, LENGTH].to(torch.int32)
        self.chosen: list[Tensor] = []
        """The experts of the rows [rows, per_token], mixture by mixture."""
        self.groups = [(rows, table[rows, :blocks], lengths[rows]) for rows, blocks in groups]

    @cached_property
    def places(self) -> Tensor:
        """[rows] places of the newest tokens, if not the kernel of attention stores them."""
        return write_places(self.state, self.table)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        keys, values = self.cache.of_layer(layer)
        if not self.stable and on_paged_kernel(query):
            ((_, table, lengths),) = self.groups
            return store_and_attend(query, key, value, keys, values, table, lengths, scale, window, sinks)
        self.cache.store(layer, self.places, key, value)
        compute = stable_attention if self.stable else paged_attention
        if len(self.groups) == 1:
            ((_, table, lengths),) = self.groups
            return compute(query, keys, values, table, lengths, scale, window, sinks)
        out = torch.empty_like(query)
        for rows, table, lengths in self.groups:
            out[rows] = compute(query[rows], keys, values, table, lengths, scale, window, sinks)
        return out

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        self.chosen.append(chosen)
        return chosen

    def commit(self) -> None:
        if self.chosen:
            self.cache.note_experts(self.places, torch.stack(self.chosen))
        super().commit()


class DecodeStep:
    """Decoding steps of one base model over one cache."""

    def __init__(self, base: BaseModel, cache: KVCache, states: StateSlots | None, adapters: BatchedAdapters) -> None:
        self.base = base
        self.cache = cache
        self.states = states
        self.adapters = adapters
        vocabulary = (0, base.vocab_size)
        self.head = JoinedLinear(
            base.layout.projections[LM_HEAD], (vocabulary,), (WeightPiece(vocabulary, base.lm_head, None),)
        )

    def __call__(self, batch: DeviceBatch, rows: StepRows, in_place: bool = False) -> Tensor:
        """Compute the first rows of the batch and advance them; returns their logits [rows, vocabulary] in float32.

        What was drawn lies in `batch.drawn`. If it raises, the rows are wrong, but states of gated delta nets have been
        stepped only if `in_place`.
        """
        state, table = batch.state[: rows.count], batch.table[: rows.count]
        steps: StateSteps | StepsInPlace | None = None
        if self.states:
            slots = state[:, SLOT]
            steps = StepsInPlace(self.states, slots) if in_place else StateSteps(self.states, slots, [1] * rows.count)
        plan = DecodePlan(self.cache, state, table, rows.groups, steps, self.base.deterministic)
        positions = (state[:, LENGTH] + state[:, POSITION]).expand(3 if self.base.family.mrope else 1, -1)
        if rows.owner is None and self.base.decoder is not None and not self.base.deterministic:
            logits = self._logits(self.base.decoder, state, positions, plan, rows.has_adapters)
        else:
            logits = self._logits_of(rows.owner, state, positions, plan)
        tokens, logprobs = choose_next(logits, choice_of_rows(state), rows.truncates)
        drawn = torch.stack([tokens.double(), logprobs.double()], dim=1)  # [rows, 2]
        plan.commit()
        # From here on nothing takes memory: a state that has been stepped is not stepped again.
        batch.drawn[: rows.count].copy_(drawn)
        state[:, TOKEN].copy_(tokens)
        state[:, LENGTH].add_(state[:, ADVANCE])
        return logits

    def can_be_captured(self, batch: DeviceBatch, rows: StepRows) -> bool:
        """Return whether a CUDA graph can hold such a step.

        Our decoder reads nothing on the host; transformers' modules may. A graph attends to all blocks that a row could
        have. Where no kernel does that, these are copied, and graphs keep the memory.
        """
        known = self.base.decoder is not None and (rows.owner is None or isinstance(rows.owner, FullWeights))
        return known and gathered_bytes(self.cache.keys[0], rows.count, batch.table.shape[1]) <= MOST_GATHERED

    def places(self) -> Hashable:
        """Return the addresses of what steps read beside the batch: while equal, a captured step can be replayed."""
        tensors = [self.cache.keys, self.cache.values, self.cache.routes]
        tensors += [self.base.lm_head, next(self.base.language_model.parameters())]
        if self.states:
            tensors += [self.states.inputs, self.states.memory]
        return self.adapters.generation, *(tensor.data_ptr() for tensor in tensors)

    def _logits(
        self, decoder: Decoder, state: Tensor, positions: Tensor, plan: DecodePlan, has_adapters: bool
    ) -> Tensor:
        """Compute the logits of rows of the base and of adapters that have columns."""
        embeddings = self.base.language_model.get_input_embeddings()(state[:, TOKEN])
        adapters = self.adapters.for_rows(state[:, COLUMNS : COLUMNS + 2]) if has_adapters else BareRows()
        hidden = decoder.forward(embeddings, positions, plan, adapters)
        return adapters.apply(self.head, hidden).float()

    def _logits_of(self, owner: Weights | None, state: Tensor, positions: Tensor, plan: DecodePlan) -> Tensor:
        """Compute the logits of rows that all have these weights."""
        row = PackedRow(
            token_ids=state[:, TOKEN],
            positions=positions,
            lengths=[1] * len(state),
            segments=segments_of([len(state)], [owner]),
            image_index=torch.empty(0, dtype=torch.int64),
            images=[],
            full=owner if isinstance(owner, FullWeights) else None,
        )
        hidden = self.base.hidden_states(row, plan)
        return head_logits(hidden, self.base.head(owner), *head_lora(owner), stable=self.base.deterministic)


def choice_of_rows(state: Tensor) -> DeviceChoice:
    """Read from `DeviceBatch.state` how each row chooses its next token."""
    numbers = state.view(torch.float64)
    return DeviceChoice(
        temperature=numbers[:, TEMPERATURE].float(),
        top_k=state[:, TOP_K],
        top_p=numbers[:, TOP_P].float(),
        seed=state[:, SEED],
        sample=state[:, SAMPLE],
        position=state[:, LENGTH] + state[:, DRAWN],
    )


def rows_of(batch: DeviceBatch, owner: Weights | None) -> StepRows:
    """Collect the host's facts about the rows in use. `owner` has all of them, if their weights have no columns."""
    jobs = [seat.sequence.job for seat in batch.seats]
    on_cpu = batch.device.type == "cpu"
    return StepRows(
        count=len(jobs),
        truncates=any(job.params.top_k > 0 or job.params.top_p < 1 for job in jobs),
        needs_logits=any(seat.sequence.job.topk or seat.sequence.shape is not None for seat in batch.seats),
        has_adapters=owner is None and any(job.weights is not None for job in jobs),
        groups=_similar([seat.blocks for seat in batch.seats]) if on_cpu else [(slice(None), batch.table.shape[1])],
        owner=owner,
    )


def _similar(blocks: list[int]) -> list[Together]:
    """Group rows whose numbers of blocks differ by a factor of two at most. All up to `NARROW` are in one."""
    classes: dict[int, list[int]] = {}
    for row, count in enumerate(blocks):
        classes.setdefault((max(count, NARROW) - 1).bit_length(), []).append(row)
    if len(classes) == 1:
        return [(slice(None), max(blocks))]
    return [(torch.tensor(rows), max(blocks[row] for row in rows)) for rows in classes.values()]
