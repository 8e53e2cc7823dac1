"""The `Sampler` of one base model whose samples vLLM servers compute.

Requests go to the client's thread, and `step` returns what has come back. Only what needs the trainer's own model
happens in the sampler's thread, in `step`, one piece at a time: the canary of new weights, and answers about a prompt
that vLLM cannot give.
"""

import atexit
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from tinsmith.config import Config
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.full import Weights
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.choose import Choice, choose
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled, ref_of
from tinsmith.sampling.stopping import stop_rule
from tinsmith.sampling.vllm.client import VLLMClient
from tinsmith.sampling.vllm.job import Job
from tinsmith.sampling.vllm.launch import launches
from tinsmith.sampling.vllm.loader import WeightLoader
from tinsmith.sampling.vllm.protocol import check_parameters, longest_answer
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.servers import Launch
from tinsmith.sampling.vllm.verify import Canary, Expectation, PublishedWeights, TryOut, make_probes, score_prompt
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, WeightFiles
from tinsmith.store.records import LOCAL
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, VersionSpan

log = logging.getLogger(__name__)

# The trainer's own model, where vLLM's samples need it: for canaries, and for questions that vLLM cannot answer.


def local_questions(request: SampleRequest) -> PromptQuestions:
    """Return the questions that vLLM cannot answer: logprobs of ids of the client's choice, alternative tokens."""
    return replace(request.questions, logprobs=False, topk=0, last_n=None)


class TrainerModel:
    """Computes with the trainer's model, in the trainer's thread."""

    def __init__(self, base: BaseModel, canary: Canary, logits_chunk: int, forget: Callable[[str], None]) -> None:
        """`forget` is given the key of weights that no object in memory holds any more.

        Those that come back have another object.
        """
        self.base = base
        self.canary = canary
        self.logits_chunk = logits_chunk
        self.forget = forget
        self.canaries: dict[str, Expectation] = {}
        """Key of the weights -> the trainer's results for the canary, as long as the weights are in memory."""
        self.holders: dict[str, WeakValueDictionary[int, Weights]] = {}
        """Key of the weights -> all objects in memory that hold them, by `id`."""

    def knows(self, weights: Weights | None) -> bool:
        """Return whether the canary was computed with these weights."""
        return ref_of(weights, self.base.name).key in self.canaries

    def published(self, weights: Weights | None) -> PublishedWeights:
        """Return the weights with their canary, computed now if it is not known."""
        self.forget_unused()
        ref = ref_of(weights, self.base.name)
        if ref.key not in self.canaries:
            self.canaries[ref.key] = self.canary.expected(weights)
        if weights is not None:
            self.holders.setdefault(ref.key, WeakValueDictionary())[id(weights)] = weights
        return PublishedWeights(weights, self.canaries[ref.key], ref)

    @property
    def unused(self) -> list[str]:
        return [key for key, holders in self.holders.items() if not holders]

    def forget_unused(self) -> None:
        for key in self.unused:
            del self.holders[key], self.canaries[key]
            self.forget(key)

    def answers(self, request: SampleRequest, rendered: RenderedInput, weights: Weights | None) -> PromptAnswers:
        """Answer the `local_questions`."""
        asked = local_questions(request)
        return self._scored(request, rendered, weights, asked, _seed_of(request))[0] if asked else PromptAnswers()

    def sampled(
        self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None
    ) -> SampleResult:
        """Answer about a prompt that fills the context, with the one token that comes with that."""
        count, seed = request.num_samples, _seed_of(request)
        answers, logits = self._scored(request, rendered, weights, request.questions, seed)
        params, topk = request.params, request.topk_sample_logprobs
        how = [Choice(params, seed, sample, 0, topk) for sample in range(count)]
        rule = stop_rule(params.stop, self.base.eos_token_ids(), self.base.tokenizer)
        version = (VersionSpan(ref_of(weights, self.base.name).label, 0, 1),)
        sequences = []
        for chosen in choose(logits.expand(count, -1), how):
            tokens, logprobs = chosen.top
            top = (
                TopLogprobs(np.array([tokens], dtype=np.int32), np.array([logprobs], dtype=np.float32))
                if topk
                else None
            )
            stops = rule.for_another().stops(chosen.token)
            sequences.append(
                SampledSequence([chosen.token], [chosen.logprob], "stop" if stops else "length", top, version)
            )
        return SampleResult(request_id, sequences, answers, len(rendered), 0)

    def _scored(
        self,
        request: SampleRequest,
        rendered: RenderedInput,
        weights: Weights | None,
        asked: PromptQuestions,
        seed: int,
    ) -> tuple[PromptAnswers, Tensor]:
        """Score a prompt: answers, and the logits [1, vocabulary] behind it."""
        scores = PromptScores(rendered, asked, request.params, seed)
        logits = score_prompt(self.base, rendered, weights, scores, self.logits_chunk)
        return scores.answers, logits


def _seed_of(request: SampleRequest) -> int:
    return secrets.randbits(64) if request.params.seed is None else request.params.seed


# The sampler, and how its servers start.


@dataclass(eq=False)
class _Pending:
    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    weights: Weights | None
    stream: bool
    max_tokens: int
    fills_context: bool
    """Whether its prompt fills the context: vLLM refuses it, and the trainer's model answers all."""
    came: "deque[tuple[_Pending, TokensSampled | None]]"
    """Takes its new tokens, and at last None. Filled by the client's thread."""
    wake: Callable[[], None]
    tenant: str
    future: "Future[SampleResult] | None" = None

    @property
    def needs_trainer(self) -> bool:
        return self.fills_context or bool(local_questions(self.request))

    def job(self, base: BaseModel, published: PublishedWeights, answers: PromptAnswers) -> Job:
        tell = self._take if self.stream else None
        asked = self.request_id, self.request, self.rendered
        return Job(*asked, published, self.max_tokens, base, answers, tell, self.tenant)

    def submitted(self, future: "Future[SampleResult]") -> None:
        self.future = future
        future.add_done_callback(lambda _: self._take(None))

    def _take(self, tokens: TokensSampled | None) -> None:
        self.came.append((self, tokens))
        self.wake()

    def taken_future(self) -> "Future[SampleResult]":
        """Return the future and forget it: each holds the other, and so the weights, longer than they are needed."""
        future, self.future = self.future, None
        assert future is not None, "it was submitted"
        return future


class VLLMSampler:
    """The `Sampler` of one base model at its vLLM servers."""

    def __init__(
        self, base: BaseModel, client: VLLMClient, trainer: TrainerModel, longest: int, wake: Callable[[], None]
    ) -> None:
        """Prompt and answer have at most `longest` tokens.

        `wake` is called in another thread when `step` has something to return.
        """
        self.base = base
        self.client = client
        self.trainer = trainer
        self.longest = longest
        self.wake = wake
        self.pending: dict[str, _Pending] = {}
        self.new: deque[_Pending] = deque()
        self.published: deque[Weights] = deque()
        self.came: deque[tuple[_Pending, TokensSampled | None]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.came or self.new or self.published or self.trainer.unused)

    @property
    def load(self) -> tuple[int, int]:
        waiting = sum(pending.request.num_samples for pending in self.new)
        return sum(pending.request.num_samples for pending in self.pending.values()) - waiting, waiting

    @property
    def places(self) -> int:
        return sum(server.slots for server in self.client.servers.all)

    @property
    def room(self) -> int:
        """Requests that may still be added: as many may wait for a server as it computes at a time."""
        return 2 * self.places - sum(self.load)

    def add(
        self,
        request_id: str,
        request: SampleRequest,
        rendered: RenderedInput,
        weights: Weights | None,
        stream: bool = False,
        tenant: str = LOCAL,
    ) -> None:
        check_parameters(request)
        request.questions.check(len(rendered), self.base.vocab_size)
        ref_of(weights, self.base.name)
        longest = longest_answer(request, len(rendered), self.longest, self.base.name)
        fills = len(rendered) >= self.longest
        asked = request_id, request, rendered, weights, stream
        pending = _Pending(*asked, longest, fills, self.came, self.wake, tenant)
        self.pending[request_id] = pending
        self.new.append(pending)

    @property
    def has_samples(self) -> bool:
        """True while requests need the servers."""
        return bool(self.pending)

    def fall_asleep(self) -> "Future[None]":
        """Put all servers to sleep, so that the trainer has their GPU. `wake` is called when they sleep."""
        return self.client.run(self.client.sleep_mode.fall_asleep(), self.wake)

    def wake_up(self) -> "Future[None]":
        """Let the servers have the GPU again. `wake` is called when they have."""
        return self.client.run(self.client.sleep_mode.wake_up(), self.wake)

    def prepare(self, request: SampleRequest) -> None:
        """Its servers do that."""

    def check_model(self, shape: LoraShape) -> None:
        targets = self.base.layout.covered(shape) if shape.rank else ()
        for instance in self.client.servers.instances:
            self.client.publisher.tryout.is_merged(instance, targets)

    def publish(self, weights: Weights) -> None:
        model_id = ref_of(weights, self.base.name).inflight_of
        for pending in self.new:
            if model_id is not None and ref_of(pending.weights, self.base.name).inflight_of == model_id:
                pending.weights = weights
        self.published.append(weights)

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> list[SampleEvent]:
        """Do one piece of work, none of which takes so long that `deliver` is called."""
        self.trainer.forget_unused()
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

    def _prepare(self, events: list[SampleEvent]) -> None:
        """Hand new weights and requests to the client, up to the second that the trainer's model must compute for."""
        computed = False
        while self.published or self.new:
            if self.published:
                must_compute = not self.trainer.knows(self.published[0])
            else:
                must_compute = self.new[0].needs_trainer or not self.trainer.knows(self.new[0].weights)
            if must_compute and computed:
                return
            computed |= must_compute
            if self.published:  # its faults are raised for the requests that sample from it
                weights = self.published.popleft()
                with failing_into(partial(log.warning, "the canary of published weights could not be computed: %s")):
                    self.client.publish(self.trainer.published(weights))
            else:
                self._submit(self.new.popleft(), events)

    def _submit(self, pending: _Pending, events: list[SampleEvent]) -> None:
        asked = pending.request, pending.rendered, pending.weights
        failures: list[TinsmithError] = []
        with failing_into(failures.append):
            if pending.fills_context:
                result = self.trainer.sampled(pending.request_id, *asked)
                del self.pending[pending.request_id]
                events += [
                    *(result.tokens_of(index) for index in range(len(result.sequences)) if pending.stream),
                    result,
                ]
            else:
                job = pending.job(self.base, self.trainer.published(pending.weights), self.trainer.answers(*asked))
                pending.submitted(self.client.run(self.client.sample(job)))
        for error in failures:
            del self.pending[pending.request_id]
            events.append(SampleFailure(pending.request_id, error))


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

    `renderer` makes the canary's prompt. `wake` is called in another thread when `step` has something to return. Raises
    ConfigError for a configuration that cannot work.
    """
    if config.vllm.vllm_urls and len(config.base_models) > 1:
        raise ConfigError(
            "--vllm-url names the servers of one base model; serve one, or let Tinsmith start the vLLM servers"
        )
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
    # The engine is silent during a broadcast: it must be given up, with its reason, before the server is ended because
    # it hangs.
    longest_broadcast_s = min(LONGEST_BROADCAST_S, 0.8 * config.vllm.vllm_hung_s)
    loader = WeightLoader(files, longest_broadcast_s)
    tryout = TryOut(canary, loader, pick_device(config.models.device), make_probes(canary, files))
    client = VLLMClient(
        sources, config.sampling.max_running, config.vllm.vllm_hung_s, Publisher(canary, loader, tryout)
    )
    return VLLMSampler(
        base, client, TrainerModel(base, canary, config.training.logits_chunk, client.forget), longest, wake
    )


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "unix" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/")):
        raise ConfigError(
            f"--vllm-url {url}: give scheme, host and port, as in http://127.0.0.1:8001, or unix: "
            "and the path of a socket"
        )
