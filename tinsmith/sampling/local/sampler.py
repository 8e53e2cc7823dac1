"""The local sampler: continuous batching on the training weights, with a paged cache and slots for gated delta nets.

Each `step` gives every running sequence its next token (`decoding.py`), and computes a piece of the waiting prompts in
one pass, whatever their models and snapshots. `queues.py` has the sequences, `schedule.py` decides what is computed.
"""

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial

from tinsmith.chat.grammar import Grammars, GrammarState
from tinsmith.config import SamplingConfig
from tinsmith.errors import UserError
from tinsmith.memory.budget import BLOCK, CPU_CACHE, CacheShape, CacheSizes
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.decoding import Decoding
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.lookahead import Lookahead
from tinsmith.sampling.local.outcomes import SequenceOutcomes
from tinsmith.sampling.local.prompt_pass import PromptPasses
from tinsmith.sampling.local.queues import Queues
from tinsmith.sampling.local.schedule import Schedule
from tinsmith.sampling.local.sequence import SampleJob, SequenceState
from tinsmith.sampling.local.states import StateSlots
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, ref_of
from tinsmith.sampling.shaping import Shape
from tinsmith.sampling.stopping import stop_rule
from tinsmith.store import ids
from tinsmith.store.records import LOCAL
from tinsmith.wire.sample import SampleRequest

_GRAMMARS = 32
"""Compiled grammars that are kept."""


class LocalSampler:
    """The `Sampler` of one base model in this process."""

    def __init__(
        self, base: BaseModel, config: SamplingConfig, logits_chunk: int, sizes: CacheSizes | None = None
    ) -> None:
        """`sizes` are the cache's; None divides `config.kv_cache_gib`.

        Raises ConfigError if that does not hold one sequence.
        """
        self.base = base
        self.records_routes = base.follows_experts and config.recorded_routes_gib > 0
        shape = CacheShape(base.layout.layers, base.dtype, base.device, base.layout.experts)
        sizes = sizes or shape.divide(int(config.kv_cache_gib * 2**30) or CPU_CACHE, config.max_running)
        self.cache = KVCache(shape, sizes.blocks)
        self.states = StateSlots(shape, sizes.slots) if shape.state_bytes else None
        places = min(config.max_running, sizes.places) if self.states else config.max_running
        self.queues = Queues(self.cache, self.states)
        self.schedule = Schedule(self.queues, places, config.prefill_tokens, config.prefill_tokens_beside)
        outcomes = SequenceOutcomes(self.schedule)
        self.prompts = PromptPasses(base, self.schedule, outcomes, logits_chunk)
        self.decoding = Decoding(base, self.cache, self.states, places, config.eager)
        self._begun = lru_cache(_GRAMMARS)(self._begin)
        self.steps = Lookahead(self.schedule, self.decoding, outcomes, runs_ahead=base.device.type == "cuda")

    def capacity(self) -> str:
        """Say how many tokens and states fit, for the log."""
        tokens = f"{self.cache.total * BLOCK:,} tokens"
        if self.states is None:
            return tokens
        return (
            f"{tokens} and {self.states.total:,} states of sequences, of which "
            f"{self.schedule.max_running:,} run at once"
        )

    @property
    def longest(self) -> int:
        return min(self.base.max_context, self.cache.total * BLOCK)

    @property
    def has_work(self) -> bool:
        return bool(self.queues.waiting or self.queues.filling or self.queues.running)

    @property
    def load(self) -> tuple[int, int]:
        return len(self.queues.running), sum(1 + s.forks for s in (*self.queues.filling, *self.queues.waiting))

    @property
    def places(self) -> int:
        return self.schedule.max_running

    @property
    def room(self) -> int:
        return self.schedule.max_running - sum(1 + s.forks for s in self.queues.waiting)

    def check_model(self, shape: LoraShape) -> None:
        """It samples whatever can be trained."""

    def prepare(self, request: SampleRequest) -> None:
        if request.shaping.grammar is not None:
            self._begun(request.shaping.grammar)

    def add(
        self,
        request_id: str,
        request: SampleRequest,
        rendered: RenderedInput,
        weights: Weights | None,
        stream: bool = False,
        tenant: str = LOCAL,
    ) -> None:
        params = request.params
        request.questions.check(len(rendered), self.base.vocab_size)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        job = SampleJob(
            request_id=request_id,
            session=ids.session_of(request.sampling_session_id),
            rendered=rendered,
            weights=weights,
            ref=ref_of(weights, self.base.name),
            stream=stream,
            params=params,
            num_samples=request.num_samples,
            scores=PromptScores(rendered, request.questions, params, seed) if request.questions else None,
            topk=request.topk_sample_logprobs,
            seed=seed,
            max_new=self._max_new(request, len(rendered)),
            wants_routes=request.rollout_expert_indices
            or (self.records_routes and weights is not None and not request.only_scores),
            tenant=tenant,
            unfinished=request.num_samples,
        )
        rule = stop_rule(params.stop, self.base.eos_token_ids(), self.base.tokenizer)
        shape = self._shaped(request, rendered)
        job.sequences = [
            SequenceState(job, index, rule.for_another(), shape=shape()) for index in range(job.num_samples)
        ]
        self.queues.waiting.add(job.session, job.sequences[0])

    def _shaped(self, request: SampleRequest, rendered: RenderedInput) -> Callable[[], Shape | None]:
        """Return what makes the shape of each sample. Raises UserError for a grammar that cannot be kept to."""
        shaping = request.shaping
        if not shaping.changes:
            return lambda: None
        begun = None if shaping.grammar is None else self._begun(shaping.grammar)
        ends = request.params.stop.token_ids
        return lambda: Shape(shaping, rendered.token_ids, begun and begun.copy(), ends)

    def _begin(self, grammar: str) -> GrammarState:
        return self._grammars.begin(grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.base.tokenizer.backend_tokenizer, self.base.vocab_size, self.base.eos_token_ids())

    def publish(self, weights: Weights) -> None:
        """Compute again what the former weights have computed; complete answers about a prompt stay."""
        ref = ref_of(weights, self.base.name)
        if ref.inflight_of is None:
            return
        for job in self.queues.restart(lambda sequence: sequence.job.ref.inflight_of == ref.inflight_of):
            job.weights, job.ref = weights, ref
            if job.scores and not job.scores.complete:
                job.scores = PromptScores(job.rendered, job.scores.asked, job.params, job.seed)

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> list[SampleEvent]:
        """Compute a token of every running sequence, and a piece of the prompts that wait.

        `deliver` is given what comes before that piece.

        What runs out of memory leaves no trace, and is smaller next time. Raises errors of deciding what to compute.
        """
        try:
            if not self.steps.flights:
                self.schedule.grow()
            self.schedule.admit()
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and self.schedule.retreat([])):
                raise
            return []
        events = self.steps.advance()
        windows = self.schedule.prompt_windows()
        if windows:
            if deliver is not None:
                deliver(events)
                events = []
            events += self.prompts.run(windows, partial(self._between_layers, deliver))
        self.steps.rest()
        return events

    def _between_layers(self, deliver: Callable[[Sequence[SampleEvent]], None] | None) -> list[SampleEvent]:
        """Read steps launched ahead amid a pass over prompts: running sequences need not wait for its end."""
        events = self.steps.read()
        if deliver is None or not events:
            return events
        deliver(events)
        return []

    def cancel(self, request_id: str) -> None:
        self.queues.drop(lambda sequence: sequence.job.request_id == request_id)
        self.steps.rest()

    def abandon(self) -> None:
        self.queues.clear()
        self.steps.clear()

    def _max_new(self, request: SampleRequest, prompt: int) -> int:
        longest = request.most_tokens(prompt, self.base.max_context, self.base.name)
        room = self.cache.total * BLOCK - prompt
        if request.params.max_tokens is None:
            longest = max(1, min(longest, room))
        if longest > max(room, int(longest == 1 and room == 0)):  # one token behind the prompt needs no place
            raise UserError(
                f"prompt length plus max_tokens is {prompt + longest} tokens, but the key/value cache holds "
                f"{self.cache.total * BLOCK}; "
                "ask for fewer tokens or start the server with a larger --kv-cache-gib"
            )
        return longest
