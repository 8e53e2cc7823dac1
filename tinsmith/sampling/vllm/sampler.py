"""The `Sampler` of one base model whose samples vLLM servers compute.

Requests go to the client's thread, and `step` returns what has come back. Only what needs the trainer's own model happens in the sampler's
thread, in `step`, one piece at a time: the canary of new weights, and answers about a prompt that vLLM cannot give.
"""

import atexit
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from tinsmith.config import Config
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.memory.cache_sizes import BLOCK
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.full import Weights
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.choose import Choice, choose
from tinsmith.sampling.prefix import prompt_keys, weights_key
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled, ref_of
from tinsmith.sampling.stopping import stop_rule
from tinsmith.sampling.vllm.client import VLLMClient
from tinsmith.sampling.vllm.job import Draft, Job
from tinsmith.sampling.vllm.launch import launches
from tinsmith.sampling.vllm.protocol import check_parameters, longest_answer
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.servers import Launch
from tinsmith.sampling.vllm.verify import Canary, Expectation, PublishedWeights, make_probes, score_prompt
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, WeightFiles
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, VersionSpan

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    weights: Weights | None
    stream: bool
    max_tokens: int
    future: "Future[SampleResult] | None" = None

    def fills(self, context: int) -> bool:
        """Return whether its prompt fills the context: vLLM refuses it, and the trainer's model answers all."""
        return len(self.rendered) >= context

    @property
    def local_questions(self) -> PromptQuestions:
        """Questions about its prompt that vLLM cannot answer: log-probabilities of ids of the client's choice, alternative tokens."""
        return replace(self.request.questions, logprobs=False, topk=0, last_n=None)

    def taken_future(self) -> "Future[SampleResult]":
        """Return the future and forget it: each holds the other, and so the weights, longer than they are needed."""
        future, self.future = self.future, None
        assert future is not None, "it was submitted"
        return future


class VLLMSampler:
    """The `Sampler` of one base model at its vLLM servers."""

    def __init__(
        self, base: BaseModel, canary: Canary, client: VLLMClient, longest: int, logits_chunk: int, wake: Callable[[], None]
    ) -> None:
        """Prompt and answer have at most `longest` tokens. `wake` is called in another thread when `step` has something to return."""
        self.base = base
        self.canary = canary
        self.client = client
        self.longest = longest
        self.logits_chunk = logits_chunk
        self.wake = wake
        self.pending: dict[str, _Pending] = {}
        self.new: deque[_Pending] = deque()
        self.published: deque[Weights] = deque()
        self.came: deque[tuple[_Pending, TokensSampled | None]] = deque()
        """Requests with their new tokens, None if they have ended. Filled by the client's thread."""
        self.canaries: dict[str, Expectation] = {}
        """Key of the weights -> the trainer's results for the canary, as long as the weights are in memory."""
        self.holders: dict[str, WeakValueDictionary[int, Weights]] = {}
        """Key of the weights -> all objects in memory that hold them, by `id`."""

    @property
    def has_work(self) -> bool:
        return bool(self.came or self.new or self.published or self._unused())

    @property
    def load(self) -> tuple[int, int]:
        waiting = sum(pending.request.num_samples for pending in self.new)
        return sum(pending.request.num_samples for pending in self.pending.values()) - waiting, waiting

    @property
    def room(self) -> int:
        """Requests that may still be added: as many may wait for a server as it computes at a time."""
        return 2 * sum(server.slots for server in self.client.servers.all) - sum(self.load)

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, stream: bool = False) -> None:
        check_parameters(request)
        request.questions.check(len(rendered), self.base.vocab_size)
        ref_of(weights, self.base.name)
        longest = longest_answer(request, len(rendered), self.longest, self.base.name)
        self.pending[request_id] = _Pending(request_id, request, rendered, weights, stream, longest)
        self.new.append(self.pending[request_id])

    @property
    def has_samples(self) -> bool:
        """True while requests need the servers."""
        return bool(self.pending)

    def fall_asleep(self) -> "Future[None]":
        """Put all servers to sleep, so that the trainer has their GPU. `wake` is called when they sleep."""
        return self._switch(self.client.sleep_mode.fall_asleep())

    def wake_up(self) -> "Future[None]":
        """Let the servers have the GPU again. `wake` is called when they have."""
        return self._switch(self.client.sleep_mode.wake_up())

    def _switch(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        future = self.client.run(work)
        future.add_done_callback(lambda _: self.wake())
        return future

    def check_model(self, shape: LoraShape) -> None:
        targets = self.base.layout.covered(shape) if shape.rank else ()
        for instance in [server.instance for server in self.client.servers.all if server.instance is not None]:
            self.client.publisher.is_merged(instance, targets)

    def publish(self, weights: Weights) -> None:
        model_id = ref_of(weights, self.base.name).inflight_of
        for pending in self.new:
            if model_id is not None and ref_of(pending.weights, self.base.name).inflight_of == model_id:
                pending.weights = weights
        self.published.append(weights)

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> list[SampleEvent]:
        """Do one piece of work, none of which takes so long that `deliver` is called."""
        self._forget_unused()
        events: list[SampleEvent] = []
        while self.came:
            pending, tokens = self.came.popleft()
            if self.pending.get(pending.request_id) is not pending:  # it was cancelled, and the id may have come again
                continue
            if tokens is not None:
                events.append(tokens)
                continue
            del self.pending[pending.request_id]
            events.append(_outcome(pending.request_id, pending.taken_future()))
        self._prepare(events)
        return events

    def cancel(self, request_id: str) -> None:
        pending = self.pending.pop(request_id, None)
        if pending is None:
            return
        if pending.future is None:
            self.new.remove(pending)
        else:
            pending.taken_future().cancel()  # vLLM aborts a request when its connection is closed

    def abandon(self) -> None:
        for request_id in list(self.pending):
            self.cancel(request_id)

    # What needs the trainer's model

    def _prepare(self, events: list[SampleEvent]) -> None:
        """Hand published weights and new requests to the client, up to the second of them that has to be computed for."""
        computed = False
        while self.published:
            must_compute = not self._is_known(self.published[0])
            if must_compute and computed:
                return
            computed |= must_compute
            self._publish(self.published.popleft())
        while self.new:
            pending = self.new[0]
            must_compute = not self._is_known(pending.weights) or bool(pending.local_questions) or pending.fills(self.longest)
            if must_compute and computed:
                return
            computed |= must_compute
            self._submit(self.new.popleft(), events)

    def _publish(self, weights: Weights) -> None:
        """Hand weights to the client. Their faults are raised for the requests that sample from them."""
        with failing_into(partial(log.warning, "the canary of published weights could not be computed: %s")):
            self.client.publish(self._with_canary(weights))

    def _submit(self, pending: _Pending, events: list[SampleEvent]) -> None:
        with failing_into(partial(self._fail, pending, events)):
            if pending.fills(self.longest):
                result = self._answered_here(pending)
                del self.pending[pending.request_id]
                events += [*(result.tokens_of(index) for index in range(len(result.sequences)) if pending.stream), result]
            else:
                pending.future = self.client.run(self.client.sample(self._job(pending)))
                pending.future.add_done_callback(partial(self._take, pending, None))

    def _fail(self, pending: _Pending, events: list[SampleEvent], error: TinsmithError) -> None:
        del self.pending[pending.request_id]
        events.append(SampleFailure(pending.request_id, error))

    def _job(self, pending: _Pending) -> Job:
        published, asked = self._with_canary(pending.weights), pending.local_questions
        return Job(
            request_id=pending.request_id,
            request=pending.request,
            rendered=pending.rendered,
            published=published,
            max_tokens=pending.max_tokens,
            eos=self.base.eos_token_ids(),
            vocab_size=self.base.vocab_size,
            tokenizer=self.base.tokenizer,
            keys=prompt_keys(weights_key(published.ref), pending.rendered, [], [], len(pending.rendered) // BLOCK),
            answers=self._scored(pending, asked, _seed_of(pending))[0] if asked else PromptAnswers(),
            tell=partial(self._take, pending) if pending.stream else None,
            drafts=[Draft() for _ in range(pending.request.num_samples)],
        )

    def _take(self, pending: _Pending, tokens: TokensSampled | None, _: object = None) -> None:
        """Take new tokens of a request, or its end, in the client's thread."""
        self.came.append((pending, tokens))
        self.wake()

    def _scored(self, pending: _Pending, asked: PromptQuestions, seed: int) -> tuple[PromptAnswers, Tensor]:
        """Score a prompt with the trainer's model: answers, and the logits [1, vocabulary] behind it."""
        scores = PromptScores(pending.rendered, asked, pending.request.params, seed)
        logits = score_prompt(self.base, pending.rendered, pending.weights, scores, self.logits_chunk)
        return scores.answers, logits

    def _answered_here(self, pending: _Pending) -> SampleResult:
        """Answer about a prompt that fills the context, with the one token that comes with that."""
        request, count, seed = pending.request, pending.request.num_samples, _seed_of(pending)
        answers, logits = self._scored(pending, request.questions, seed)
        params, topk = request.params, request.topk_sample_logprobs
        how = Choice.for_params([params] * count, [seed] * count, range(count), [0] * count, [topk] * count)
        rule = stop_rule(params.stop, self.base.eos_token_ids(), self.base.tokenizer)
        version = (VersionSpan(ref_of(pending.weights, self.base.name).label, 0, 1),)
        sequences = []
        for chosen in choose(logits.expand(count, -1), how):
            tokens, logprobs = chosen.top
            top = TopLogprobs(np.array([tokens], dtype=np.int32), np.array([logprobs], dtype=np.float32)) if topk else None
            stops = rule.for_another().stops(chosen.token)
            sequences.append(SampledSequence([chosen.token], [chosen.logprob], "stop" if stops else "length", top, version))
        return SampleResult(pending.request_id, sequences, answers, len(pending.rendered), 0)

    def _is_known(self, weights: Weights | None) -> bool:
        """Return whether the canary was computed with these weights."""
        return ref_of(weights, self.base.name).key in self.canaries

    def _with_canary(self, weights: Weights | None) -> PublishedWeights:
        self._forget_unused()
        ref = ref_of(weights, self.base.name)
        if ref.key not in self.canaries:
            self.canaries[ref.key] = self.canary.expected(weights)
        if weights is not None:
            self.holders.setdefault(ref.key, WeakValueDictionary())[id(weights)] = weights
        return PublishedWeights(weights, self.canaries[ref.key], ref)

    def _forget_unused(self) -> None:
        """Take weights off the servers that no object in memory holds any more. Those that left it and came back have another object."""
        for key in self._unused():
            del self.holders[key], self.canaries[key]
            self.client.forget(key)

    def _unused(self) -> list[str]:
        return [key for key, holders in self.holders.items() if not holders]


def _seed_of(pending: _Pending) -> int:
    seed = pending.request.params.seed
    return secrets.randbits(64) if seed is None else seed


def _outcome(request_id: str, future: "Future[SampleResult]") -> SampleEvent:
    if future.cancelled():
        return SampleFailure(request_id, TinsmithError("the sample was given up, because the server stops"))
    error = future.exception()  # raised here, its traceback would hold it, and with it the weights, in a circle
    if error is None:
        return future.result()
    if not isinstance(error, TinsmithError):
        log.error("unexpected error in sample=%s", request_id, exc_info=error)
        error = TinsmithError(f"internal error: {error!r}")
    return SampleFailure(request_id, error)


def start_vllm_sampler(base: BaseModel, renderer: Renderer, config: Config, wake: Callable[[], None]) -> VLLMSampler:
    """Start the servers of a base model, or connect to those of --vllm-url, and return at once.

    `renderer` makes the canary's prompt. `wake` is called in another thread when `step` has something to return. Raises ConfigError for a
    configuration that cannot work.
    """
    if config.vllm.vllm_urls and len(config.base_models) > 1:
        raise ConfigError("--vllm-url names the servers of one base model; serve one, or let Tinsmith start the vLLM servers")
    for url in config.vllm.vllm_urls:
        _check_url(url)
    files = WeightFiles(base, config.vllm.vllm_dir)
    atexit.register(files.close)
    canary = Canary(base, renderer)
    sources: list[Launch | str] = [*config.vllm.vllm_urls]
    longest = base.max_context
    if not sources:
        started, longest = launches(base, config, files.root)
        sources += started
    # The engine is silent during a broadcast: it must be given up, with its reason, before the server is ended because it hangs.
    longest_broadcast_s = min(LONGEST_BROADCAST_S, 0.8 * config.vllm.vllm_hung_s)
    publisher = Publisher(files, canary, pick_device(config.models.device), make_probes(canary, files), longest_broadcast_s)
    client = VLLMClient(sources, config.sampling.max_running, config.vllm.vllm_hung_s, publisher)
    return VLLMSampler(base, canary, client, longest, config.training.logits_chunk, wake)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "unix" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/")):
        raise ConfigError(f"--vllm-url {url}: give scheme, host and port, as in http://127.0.0.1:8001, or unix: and the path of a socket")
