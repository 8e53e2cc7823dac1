"""The local sampler: continuous batching over the training weights, with a paged cache.

`add` takes requests; each `step` either computes prompts that wait or decodes one token of every running sequence, whatever models and
snapshots they belong to. When blocks run out, the youngest sequence gives its back and is computed again later.
"""

import logging
import secrets
from collections import deque
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.config import SamplingConfig
from tinsmith.errors import UserError
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.lora import Adapter
from tinsmith.rendering.packing import pack, packing_order, segments_of
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import choose
from tinsmith.sampling.kv_cache import BLOCK, CacheShape, DecodePlan, KVCache, PrefillPlan, blocks_for
from tinsmith.sampling.sequence import SampleJob, SampleResult, Sequence, StopRuleState, choice_of
from tinsmith.sampling.stopping import StopIds, StopStrings
from tinsmith.training.backend import is_out_of_memory
from tinsmith.training.logprobs import head_logits, head_lora, target_logprobs
from tinsmith.wire.sample import SampleRequest

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """What the engine needs of a sampler that shares its loop."""

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do something."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """How many sequences are being decoded, and how many wait."""
        ...

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, adapter: Adapter | None) -> None:
        """Accept a request. Raises UserError if it can never run."""
        ...

    def step(self) -> list[SampleResult]:
        """Do a small piece of work; returns the requests that it finished."""
        ...

    def abandon(self) -> None:
        """Forget every request, after a `step` that raised."""
        ...


class LocalSampler:
    """The `Sampler` of one base model in this process."""

    def __init__(self, base: BaseModel, config: SamplingConfig, logits_chunk: int) -> None:
        self.base = base
        self.max_running = config.max_running
        self.prefill_tokens = config.prefill_tokens
        self.logits_chunk = logits_chunk
        shape = CacheShape.of(base.text_config, base.dtype, base.device)
        self.cache = KVCache(shape, max(1, int(config.kv_cache_gib * 2**30) // shape.block_bytes))
        self.waiting: deque[Sequence] = deque()
        """The first sequence of each job that has not started, and sequences that gave their blocks back."""
        self.running: list[Sequence] = []
        """Oldest first."""

    @property
    def has_work(self) -> bool:
        """See `Sampler`."""
        return bool(self.waiting or self.running)

    @property
    def load(self) -> tuple[int, int]:
        """See `Sampler`."""
        return len(self.running), sum(s.job.num_samples if s.starts_job else 1 for s in self.waiting)

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, adapter: Adapter | None) -> None:
        """See `Sampler`."""
        params = request.params
        job = SampleJob(
            request_id=request_id,
            rendered=rendered,
            adapter=adapter,
            params=params,
            num_samples=request.num_samples,
            wants_prompt_logprobs=request.prompt_logprobs,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_new=self._max_new(len(rendered), params.max_tokens),
            unfinished=request.num_samples,
        )
        job.sequences = [Sequence(job, index, self._stop_rule(job)) for index in range(job.num_samples)]
        self.waiting.append(job.sequences[0])

    def step(self) -> list[SampleResult]:
        """See `Sampler`."""
        admitted = self._admit()
        try:
            with torch.no_grad():
                return self._prefill(admitted) if admitted else self._decode()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(admitted or self.running) < 2:
                raise
        # Outside of the handler, where the failed step holds no tensors any more.
        self._retreat(admitted)
        return []

    def abandon(self) -> None:
        """See `Sampler`."""
        self.waiting.clear()
        self.running.clear()
        self.cache.clear()

    def _max_new(self, prompt: int, wanted: int | None) -> int:
        room = min(self.base.max_context, self.cache.total * BLOCK) - prompt
        longest = max(1, room) if wanted is None else wanted
        if prompt + longest > self.base.max_context:
            raise UserError(f"prompt length plus max_tokens exceeds the context window: {prompt} + {longest} > {self.base.max_context}")
        if longest > room:
            raise UserError(
                f"prompt length plus max_tokens is {prompt + longest} tokens, but the key/value cache holds {self.cache.total * BLOCK}; "
                "ask for fewer tokens or start the server with a larger --kv-cache-gib"
            )
        return longest

    def _stop_rule(self, job: SampleJob) -> StopRuleState:
        rule = job.params.stop
        ids = (*rule.token_ids, *(self.base.eos_token_ids() if rule.eos else ()))
        return StopStrings(ids, rule.strings, self.base.tokenizer) if rule.strings else StopIds(ids)

    # Admission

    def _admit(self) -> list[Sequence]:
        """Waiting sequences, in order, whose prompts fit into this step, the running set and the free blocks.

        A prompt that is longer than a step has one of its own. A job that is larger than the running set or the cache waits until it is
        alone, and starts what fits.
        """
        admitted: list[Sequence] = []
        tokens = blocks = 0
        running = len(self.running)
        while self.waiting:
            sequence = self.waiting[0]
            forks = sequence.job.num_samples - 1 if sequence.starts_job else 0
            blocks += blocks_for(sequence.length + 1) + forks
            tokens += sequence.length
            running += 1 + forks
            crowded = running > self.max_running or blocks > len(self.cache.free)
            if (crowded and (admitted or self.running)) or (tokens > self.prefill_tokens and admitted):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _preempt(self) -> None:
        """The youngest running sequence gives its blocks back and waits to be computed again."""
        sequence = self.running.pop()
        self.cache.give_back(sequence.blocks)
        sequence.blocks = []
        self.waiting.appendleft(sequence)

    def _retreat(self, admitted: list[Sequence]) -> None:
        """The step ran out of memory: undo it, and take half as much from now on."""
        if admitted:
            self.prefill_tokens = max(1, sum(sequence.length for sequence in admitted) // 2)
            for sequence in reversed(admitted):
                self.cache.give_back(sequence.blocks)
                sequence.blocks = []
                self.waiting.appendleft(sequence)
        else:
            self.max_running = len(self.running) // 2
            while len(self.running) > self.max_running:
                self._preempt()
        log.warning("out of memory: steps take %d prompt tokens and %d sequences now", self.prefill_tokens, self.max_running)
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()

    # Prompts

    def _prefill(self, admitted: list[Sequence]) -> list[SampleResult]:
        adapters = [sequence.job.adapter for sequence in admitted]
        order = packing_order([sequence.length for sequence in admitted], adapters)
        sequences = [admitted[i] for i in order]
        for sequence in sequences:
            sequence.blocks = self.cache.take(blocks_for(sequence.length))
        row = pack([sequence.so_far() for sequence in sequences], [s.job.adapter for s in sequences], self.base.device)
        hidden = self.base.hidden_states(row, self._prefill_plan(row, sequences))
        self._prompt_logprobs(sequences, row, hidden)
        last = torch.tensor(row.lengths).cumsum(0).to(hidden.device) - 1
        logits = self._logits(hidden[last], [s.job.adapter for s in sequences])
        started = [self._fork(sequence) for sequence in sequences]
        repeats = torch.tensor([len(group) for group in started], device=hidden.device)
        return self._append([s for group in started for s in group], logits.repeat_interleave(repeats, dim=0))

    def _prefill_plan(self, row: PackedRow, sequences: list[Sequence]) -> PrefillPlan:
        slots = [block * BLOCK + offset for s in sequences for block in s.blocks for offset in range(BLOCK)]
        keep = np.concatenate([np.arange(len(s.blocks) * BLOCK) < s.length for s in sequences])
        packed = PackedPlan(row.lengths, self.base.device, self.base.dtype)
        return PrefillPlan(self.cache, packed, torch.from_numpy(np.array(slots)[keep]).to(self.base.device))

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Start the sequences that share this prompt: all samples of a new job, of which those that find no room wait."""
        started = [sequence]
        others = sequence.job.sequences[1:] if sequence.starts_job else []
        full, rest = divmod(sequence.length, BLOCK)
        for position, other in enumerate(others):
            if len(self.running) + len(started) >= self.max_running or (rest and not self.cache.free):
                self.waiting.extendleft(reversed(others[position:]))
                break
            other.blocks = [self.cache.share(block) for block in sequence.blocks[:full]]
            if rest:
                other.blocks.append(self.cache.copy(sequence.blocks[full]))
            started.append(other)
        self.running.extend(started)
        return started

    def _prompt_logprobs(self, sequences: list[Sequence], row: PackedRow, hidden: Tensor) -> None:
        start = 0
        for sequence, length in zip(sequences, row.lengths, strict=True):
            job = sequence.job
            if job.wants_prompt_logprobs and job.prompt_logprobs is None:
                prompt = len(job.rendered)
                targets = row.token_ids[start + 1 : start + prompt].unsqueeze(1)
                segments = segments_of([prompt - 1], [job.adapter])
                rows = hidden[start : start + prompt - 1]
                scored = target_logprobs(rows, self.base.lm_head, targets, segments, self.logits_chunk).squeeze(1)
                job.prompt_logprobs = np.concatenate([np.full(1, np.nan, np.float32), scored.cpu().numpy()])
                for span in job.rendered.spans:
                    job.prompt_logprobs[span.offset : span.offset + span.length] = 0.0
            start += length

    # Decoding

    def _decode(self) -> list[SampleResult]:
        self._grow()
        sequences = self.running
        order = packing_order([0] * len(sequences), [s.job.adapter for s in sequences])
        sequences = [sequences[i] for i in order]
        adapters = [s.job.adapter for s in sequences]
        where = torch.tensor([s.job.rendered.next_position + len(s.tokens) - 1 for s in sequences])
        row = PackedRow(
            token_ids=torch.tensor([s.tokens[-1] for s in sequences]).to(self.base.device),
            positions=where.expand(3 if self.base.family.mrope else 1, -1).to(self.base.device),
            lengths=[1] * len(sequences),
            segments=segments_of([1] * len(sequences), adapters),
            picture_index=torch.empty(0, dtype=torch.int64),
            pictures=[],
        )
        plan = DecodePlan(self.cache, [s.blocks for s in sequences], [s.length for s in sequences])
        return self._append(sequences, self._logits(self.base.hidden_states(row, plan), adapters))

    def _grow(self) -> None:
        """Give every running sequence a block for its newest token; when there is none, preempt the youngest."""
        for sequence in list(self.running):
            while sequence.blocks and len(sequence.blocks) < blocks_for(sequence.length):
                if self.cache.free:
                    sequence.blocks += self.cache.take(1)
                else:
                    self._preempt()

    def _logits(self, hidden: Tensor, adapters: Items[Adapter | None]) -> Tensor:
        """[sequences, vocabulary] float32, each sequence with its adapter's LM head."""
        parts = []
        for segment in segments_of([1] * len(adapters), adapters):
            rows = hidden[segment.start : segment.end]
            parts.append(head_logits(rows, self.base.lm_head, *head_lora(segment.adapter)))
        return torch.cat(parts)

    def _append(self, sequences: list[Sequence], logits: Tensor) -> list[SampleResult]:
        """Choose the next token of each sequence, and hand back the requests that are complete."""
        tokens, logprobs = choose(logits, choice_of(sequences))
        ended = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.reason = sequence.finished_as(token)
            if sequence.reason:
                ended.append(sequence)
        return self._retire(ended)

    def _retire(self, ended: list[Sequence]) -> list[SampleResult]:
        results = []
        for sequence in ended:
            self.cache.give_back(sequence.blocks)
            sequence.blocks = []
            sequence.job.unfinished -= 1
            if sequence.job.unfinished == 0:
                results.append(sequence.job.result())
        if ended:
            self.running = [sequence for sequence in self.running if sequence.reason is None]
        return results
