"""The self-check, before a base model is served: our ways of computing it agree with each other and with transformers.

Random sequences of several lengths, with random LoRA adapters whose B is not zero, and for a vision model with an
image, whose features are compared first (`tower_check.py`):

    each sequence alone      =  transformers' own outer forward with its own attention (final soft caps, logit scales,
                             masks, positions)
    all of them in one row   =  each alone, and no sequence reaches another, forward or backward (`leaks.py`)
    sampled step by step     =  each alone (the real sampler: prompts into the paged cache, some in chunks, then
                             decoding; and again behind
                                each answer, from the prefix cache, two samples of each)

Sliding windows are shortened meanwhile, so that sequences are longer than they are. The quick form, for what has passed
the full one before, takes two short texts and an image through one packed row, one search for leaks, and a few steps of
the sampler.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import linear, softmax

from tinsmith.config import ImagesConfig, SamplingConfig
from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.kernels.compiled import compile_ahead
from tinsmith.kernels.dispatch import MOST_ROWS, has_triton
from tinsmith.memory.budget import CacheSizes, blocks_for
from tinsmith.models.attention import PackedPlan, PassPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.families import positions
from tinsmith.models.layers import Attention, DeltaNet, LayerKind
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, Segment, adapter_of, new_adapter
from tinsmith.models.network import ATTENTION, use_attention
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.leaks import CHUNK, Probe, check_leaks, gradients, packed_logprobs
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.sampler import SampleFailure, SampleResult
from tinsmith.sampling.tower_check import EXACT, EXACT_NOISE, NOISE, check_tower, refuse, rounded_otherwise
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

LENGTHS: tuple[int, ...] = (40, 7, 25, 25)
ANSWER = 12
QUICK = slice(1, 3)
"""The texts of the quick form: of two adapters, the longer one longer than a window."""
QUICK_ANSWER = 3
FURTHER = 9
"""Tokens of the text behind each answer, after which it is sampled again."""
WINDOW = 16
PIECE = 60
"""Prompt tokens that the sampler computes at a time, so that some prompts are cut."""
ROOM = 4096
PIXELS = 64
"""Width and height of the image in pixels; the model's processor may enlarge it."""
ROUNDED = 0.05
"""Normal mean difference over a sequence in bfloat16: logits from 16 to 32 are rounded to multiples of 0.125."""
REROUTED = 0.1
"""Largest share of a mixture's choices that rounding to bfloat16 may change, for which there is no bound in nats."""
OTHERWISE = "transformers computes other log-probabilities"
DECODING = "decoding with a cache gives other log-probabilities than a full forward pass"
"""Faults of a model that fails, in either form of the check."""
HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of functions between the output projection and the logits."""


@torch.no_grad()
def check_base_model(base: BaseModel, samples: bool, quick: bool = False) -> None:
    """Raise ConfigError unless all our ways to compute `base` give the same numbers, with `samples` the sampler's too.

    `quick` is for a model that has passed the full check in the same surroundings: kernels or weights that have gone
    wrong show.
    """
    # The network is shared; the configured context does not matter here
    base = replace(base, max_context=max(base.max_context, ROOM))
    try:
        with _short_windows(base):
            renderer = Renderer(base, ImagesConfig(), _no_blob)
            if renderer.processor is not None:
                check_tower(base, renderer.processor, quick)
            probes = _probes(base, renderer)
            _compile(base, probes, samples)
            if quick:
                _check_quickly(base, [*probes[QUICK], *probes[len(LENGTHS) :]], samples)
            else:
                _check(base, probes, samples)
    except ConfigError as error:
        raise ConfigError(f"{base.name} ({base.family.model_type}) cannot be served: {error}") from error
    # The network's own code does not take a packed row
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{base.name} ({base.family.model_type}) cannot be served: its network fails on a packed row: {error}"
        ) from error
    finally:
        base.features.clear()


def _compile(base: BaseModel, probes: list[Probe], samples: bool) -> None:
    if base.device.type != "cuda" or not has_triton():
        return

    # Rows of more tokens than kernels that overlap take, and a single row of the base in a step of the sampler, have
    # kernels of their own.
    long_row = probes * (1 + MOST_ROWS // sum(len(probe.rendered) for probe in probes))
    bare = [replace(probes[-1], adapter=None)]

    def rehearse() -> None:
        for row in (probes[:1], probes, long_row):
            gradients(base, row, range(len(row)))
        if samples:
            sampler = _sampler(base, probes)
            for asked, request in (
                (probes, _request(num_samples=1, prompt_logprobs=True)),
                (probes, _request(num_samples=2, prompt_logprobs=False)),
                (bare, _request(num_samples=1, prompt_logprobs=False)),
            ):
                _sampled(sampler, asked, request)

    base.features.clear()
    compile_ahead(f"{base.config.to_json_string()} {base.dtype} {samples}", rehearse)
    base.features.clear()  # those of images were computed without kernels


def _check(base: BaseModel, probes: list[Probe], samples: bool) -> None:
    _check_layers(base, probes[0])
    reference, followed = _reference(base, probes)
    alone = [_logprobs(base, [probe])[0] for probe in followed]
    bare = [_logprobs(base, [probe])[0] for probe in _without_heads(followed)]
    allowed = _allowed(base, followed, reference, bare)
    _compare(base, f"{OTHERWISE}{_head_settings(base)}", bare, reference, allowed)
    _check_routes(base, followed)
    _compare(base, "a sequence depends on others in its packed row", _logprobs(base, followed), alone, allowed)
    check_leaks(base, probes)
    if samples:
        _check_sampler(base, probes, allowed)


def _check_quickly(base: BaseModel, probes: list[Probe], samples: bool) -> None:
    reference, followed = _reference(base, probes)
    packed = _logprobs(base, _without_heads(followed))
    allowed = _allowed(base, followed, reference, packed)
    _compare(base, f"{OTHERWISE}{_head_settings(base)}", packed, reference, allowed)
    _check_routes(base, followed)
    check_leaks(base, probes, quick=True)
    if samples:
        results = _sampled(_sampler(base, probes), probes, _request(1, prompt_logprobs=False, max_tokens=QUICK_ANSWER))
        _compare(base, DECODING, *_answers(base, probes, results), allowed)


def _allowed(base: BaseModel, probes: list[Probe], reference: list[Tensor], ours: list[Tensor]) -> float:
    """Return the allowed difference of our log-probabilities.

    In float32 rounding is measured only if they are further off. `probes` follow the experts of the reference.
    """
    exact = base.dtype == torch.float32
    if exact and _difference(base, ours, reference) <= EXACT:
        return EXACT
    with rounded_otherwise(base.network if exact else base.language_model):
        other = [_transformers_logprobs(base, probe, "sdpa") for probe in probes]
    noise = _difference(base, reference, other)
    if exact:
        return max(EXACT, EXACT_NOISE * noise)
    return max(ROUNDED, NOISE * noise)


def _compare(base: BaseModel, what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], allowed: float) -> None:
    refuse(what, _difference(base, ours, theirs), allowed)


def _difference(base: BaseModel, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference in float32; in bfloat16, where values round coarsely, the largest sequence mean."""
    apart = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    return torch.stack([a.max() if base.dtype == torch.float32 else a.mean() for a in apart]).max().item()


def _reference(base: BaseModel, probes: Sequence[Probe]) -> tuple[list[Tensor], list[Probe]]:
    """Compute the log-probabilities by transformers, and return probes that follow its experts where rounding counts.

    In half precision rounding sends some tokens of a mixture to other experts, with which two correct computations are
    far apart.
    """
    choices = [_Choices(base) for _ in probes]
    reference = [
        _transformers_logprobs(base, probe, "eager", noted) for probe, noted in zip(probes, choices, strict=True)
    ]
    followed = [
        replace(probe, rendered=_following(base, probe.rendered, noted.experts))
        for probe, noted in zip(probes, choices, strict=True)
    ]
    return reference, followed


def _check_routes(base: BaseModel, followed: Sequence[Probe]) -> None:
    """Raise ConfigError if our routers would choose other experts than those followed more often than rounding does."""
    for probe in _without_heads(followed):
        if probe.rendered.routes is not None:
            row = pack([probe.rendered], [probe.adapter], base.device)
            plan = RouteCheck(row.lengths, base.device, base.dtype, routes=row.routes)
            base.hidden_states(row, plan)
            refuse("transformers chooses other experts: a share of them", plan.others / plan.all, REROUTED)


def _following(base: BaseModel, rendered: RenderedInput, experts: NDArray[Any] | None) -> RenderedInput:
    """Follow these experts [mixtures, up to n, per_token], but in float32, where all computations choose the same."""
    if experts is None or base.dtype == torch.float32 or base.decoder is None:
        return rendered
    mixtures, tokens, per_token = experts.shape
    routes = np.full((mixtures, len(rendered), per_token), -1, dtype=np.int16)
    routes[:, :tokens] = experts
    return replace(rendered, routes=routes)


# Random sequences


def _probes(base: BaseModel, renderer: Renderer) -> list[Probe]:
    """Make texts of two adapters and of the base, and a text with an image for a model that takes images."""
    adapters = [_random_adapter(base, seed=1, train_unembed=True), _random_adapter(base, seed=2, train_unembed=False)]
    owners = [adapters[0], adapters[0], adapters[1], None]
    generator = np.random.default_rng(0)
    inputs: list[tuple[list[Chunk], Adapter | None]] = [
        ([_random_text(base, generator, length)], owner) for length, owner in zip(LENGTHS, owners, strict=True)
    ]
    if base.family.takes_images:
        inputs.append((_random_image(base, generator), adapters[0]))
    return [Probe(renderer.render(chunks), adapter) for chunks, adapter in inputs]


def _no_blob(sha256: bytes) -> bytes:
    raise NotFoundError(f"the self-check stores no image, and {sha256.hex()} is asked for")


def _random_adapter(base: BaseModel, seed: int, train_unembed: bool) -> Adapter:
    shape = LoraShape(4, seed, train_unembed=train_unembed)
    adapter = new_adapter(shape, base.layout, base.device, base.dtype)
    generator = torch.Generator().manual_seed(seed)
    for pair in adapter.masters.values():  # large enough to show, small enough to leave a trained model one
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.02)
    adapter.refresh()
    adapter.ref = WeightsRef(base.name, f"self-check/{seed}", f"self-check/{seed}")
    return adapter


def _random_text(base: BaseModel, generator: np.random.Generator, length: int) -> TextChunk:
    """Draw any tokens but those that stand for images: transformers looks for their ids, we do not."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    taken = [getattr(base.config, name) for name in names] if base.family.takes_images else []
    return TextChunk(generator.choice(np.setdiff1d(np.arange(base.vocab_size, dtype=np.int32), taken), length))


def _random_image(base: BaseModel, generator: np.random.Generator) -> list[Chunk]:
    file = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(file, "PNG")
    data = file.getvalue()
    start, end = (
        TextChunk(np.array([i], dtype=np.int32))
        for i in (base.config.vision_start_token_id, base.config.vision_end_token_id)
    )
    image = ImageChunk(hashlib.sha256(data).digest(), data, "png", None)
    return [_random_text(base, generator, 9), start, image, end, _random_text(base, generator, 9)]


@contextmanager
def _short_windows(base: BaseModel) -> Iterator[None]:
    """Shorten sliding windows to `WINDOW` tokens in the layers, and in the configuration for transformers' masks."""
    with ExitStack() as restored:
        for holder in (base.language_model.config, *base.language_model.modules()):
            window = getattr(holder, "sliding_window", None)
            if isinstance(window, int) and window > WINDOW:
                restored.callback(setattr, holder, "sliding_window", window)
                holder.sliding_window = WINDOW
        yield


# The ways to compute them


class _Choices:
    """The experts that transformers' routers choose in one pass; or, if they are `given`, compute with."""

    def __init__(self, base: BaseModel, given: NDArray[np.int16] | None = None) -> None:
        self.base = base
        self.given = given
        self.noted: list[Tensor] = []

    @property
    def experts(self) -> NDArray[Any] | None:
        """[mixtures, tokens, per_token]; None in a dense model."""
        return torch.stack(self.noted).cpu().numpy() if self.noted else None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Note or give them while the body runs."""
        decoder = self.base.decoder
        with ExitStack() as hooks:
            for number, layer in enumerate(self.base.layout.experts if decoder is not None else ()):
                gate = self.base.language_model.get_submodule(f"layers.{layer}.mlp.gate")
                hooks.callback(gate.register_forward_hook(partial(self._chosen, number, layer)).remove)
            yield

    def _chosen(self, number: int, layer: int, gate: Any, inputs: Any, output: Any) -> Any:
        *others, weights, chosen = output
        if self.given is None:
            self.noted.append(chosen)
            return output
        route = torch.from_numpy(self.given[number]).to(chosen)
        h = inputs[0].reshape(-1, inputs[0].shape[-1])
        found = softmax(linear(h, gate.weight), dim=-1, dtype=torch.float32).gather(1, route)
        if self.base.layout.experts[layer].normalized:
            found = found / found.sum(-1, keepdim=True)
        return *others, found.to(weights.dtype), route


class LayerCheck:
    """A `PassPlan` that notes which layers followed it, and refuses keys and values for which the cache has no room."""

    def __init__(self, plan: PassPlan, kinds: Sequence[LayerKind]) -> None:
        self.plan = plan
        self.kinds = kinds
        self.followed: list[tuple[int, str]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.followed.append((layer, "attend"))
        kind = self.kinds[layer]
        if not isinstance(kind, Attention):
            raise ConfigError(f"layer {layer} attends, its configuration says that it is a {kind}")
        expected = kind.kv_heads, kind.head_dim
        for name, tensor in (("keys", key), ("values", value)):
            if tensor.shape[1:] != expected:
                raise ConfigError(
                    f"its {name} have {tensor.shape[1]} heads of width {tensor.shape[2]}, "
                    f"its configuration says {expected}"
                )
        return self.plan.attend(layer, query, key, value, scale, window)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        self.followed.append((layer, "convolve"))
        return self.plan.convolve(layer, x, weight)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        self.followed.append((layer, "delta_rule"))
        return self.plan.delta_rule(layer, query, key, value, decay, beta)

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        return self.plan.choose(mixture, chosen)


class RouteCheck(PackedPlan):
    """A plan of a single sequence that counts experts that the router would not have chosen."""

    all = others = 0

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        followed = super().choose(mixture, chosen)
        alike = (followed.unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1)
        self.all += alike.numel()
        self.others += int((~alike).sum())
        return followed


def _check_layers(base: BaseModel, probe: Probe) -> None:
    """Raise ConfigError unless every layer follows the plan once; one that bypasses it mixes packed sequences."""
    row = pack([probe.rendered], [probe.adapter], base.device)
    kinds = base.layout.layers
    plan = LayerCheck(PackedPlan(row.lengths, base.device, base.dtype), kinds)
    base.hidden_states(row, plan)
    needs = {Attention: ("attend",), DeltaNet: ("convolve", "delta_rule")}
    if plan.followed != [(layer, step) for layer, kind in enumerate(kinds) for step in needs[type(kind)]]:
        raise ConfigError(
            f"of its {len(kinds)} layers, {len({layer for layer, _ in plan.followed})} follow the plan of a pass"
        )


def _logprobs(base: BaseModel, probes: list[Probe]) -> list[Tensor]:
    return [logprobs.cpu() for logprobs in packed_logprobs(base, probes)]


def _transformers_logprobs(
    base: BaseModel, probe: Probe, implementation: str, choices: _Choices | None = None
) -> Tensor:
    """Compute logprobs by transformers' outer forward, with its own attention and without LoRA on the LM head.

    `choices` are noted or followed; by default those of the probe.
    """
    choices = choices or _Choices(base, probe.rendered.routes)
    rendered = probe.rendered
    ids = torch.from_numpy(rendered.token_ids).to(base.device, torch.int64).unsqueeze(0)
    extra: dict[str, Any] = {}
    if rendered.images:
        extra["pixel_values"] = torch.cat([p.pixel_values for p in rendered.images]).to(base.device, base.dtype)
        extra["image_grid_thw"] = torch.tensor([p.grid_thw for p in rendered.images], device=base.device)
        extra["mm_token_type_ids"] = (ids == base.config.image_token_id).int()
    with ExitStack() as restored:
        restored.callback(use_attention, base.network, base.family, ATTENTION)
        use_attention(base.network, base.family, implementation)
        restored.enter_context(base.active.during([Segment(0, len(rendered), probe.adapter)]))
        restored.enter_context(choices.during())
        logits = base.network(input_ids=ids, use_cache=False, **extra).logits[0]
    logprobs: Tensor = logits[:-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return logprobs.cpu()


def _without_heads(probes: Sequence[Probe]) -> list[Probe]:
    """Strip the adapters of their parts on the LM head; probes of one adapter keep sharing one."""
    bare = {id(probe.adapter): _without_head(probe.adapter) for probe in probes}
    return [replace(probe, adapter=bare[id(probe.adapter)]) for probe in probes]


def _without_head(adapter: Adapter | None) -> Adapter | None:
    if adapter is None:
        return None
    return adapter_of(
        adapter.shape, {name: pair for name, pair in adapter.masters.items() if name != LM_HEAD}, adapter.dtype
    )


def _head_settings(base: BaseModel) -> str:
    """Return a hint at the reason, such as " (logits_scaling=8.0 is not supported)"."""
    values = {name: getattr(base.text_config, name, None) for name in HEAD_SETTINGS}
    found = ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, 1.0))
    return f" ({found} is not supported)" if found else ""


def _check_sampler(base: BaseModel, probes: list[Probe], allowed: float) -> None:
    """Sample answers to all probes at once, continue behind each, and compute all of it again without a cache."""
    sampler = _sampler(base, probes)
    first = _sampled(sampler, probes, _request(num_samples=1, prompt_logprobs=True))
    prompts = []
    for result in first:
        assert result.answers.logprobs is not None
        prompts.append(torch.from_numpy(result.answers.logprobs[1:]))
    expected = [_as_sampler(probe, _logprobs(base, [probe])[0]) for probe in _as_sampled(base, probes, first)]
    _compare(base, "the sampler computes other log-probabilities of a prompt", prompts, expected, allowed)
    _compare(base, DECODING, *_answers(base, probes, first), allowed)
    generator = np.random.default_rng(1)
    further = [
        Probe(
            _followed(
                base, probe.rendered, [*result.sequences[0].tokens, *_random_text(base, generator, FURTHER).tokens]
            ),
            probe.adapter,
        )
        for probe, result in zip(probes, first, strict=True)
    ]
    second = _sampled(sampler, further, _request(num_samples=2, prompt_logprobs=False))
    if not any(result.cached_tokens for result in second):
        raise ConfigError("the sampler finds nothing of a prompt that it has computed before")
    what = "what goes on from the prefix cache gives other log-probabilities than a full forward pass"
    _compare(base, what, *_answers(base, further, second), allowed)


def _sampler(base: BaseModel, probes: list[Probe]) -> LocalSampler:
    """Make a sampler with room for two answers to each probe, twice."""
    longest = [len(probe.rendered) + ANSWER + FURTHER + ANSWER for probe in probes]
    sizes = CacheSizes(sum(2 * blocks_for(length) for length in longest), 6 * len(probes))
    return LocalSampler(base, SamplingConfig(prefill_tokens=PIECE), CHUNK, sizes)


def _sampled(sampler: LocalSampler, probes: list[Probe], request: SampleRequest) -> list[SampleResult]:
    """Sample all probes at once. Raises the error of one that fails."""
    for index, probe in enumerate(probes):
        sampler.add(str(index), request, probe.rendered, probe.adapter)
    finished: dict[int, SampleResult] = {}
    while sampler.has_work:
        for event in sampler.step():
            if isinstance(event, SampleFailure):
                raise event.error
            if isinstance(event, SampleResult):
                finished[int(event.request_id)] = event
    return [finished[index] for index in range(len(probes))]


def _answers(base: BaseModel, probes: list[Probe], results: list[SampleResult]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the log-probabilities of all answers, as sampled and by a full forward pass."""
    sampled, again = [], []
    for probe, result in zip(probes, results, strict=True):
        for answer, experts in zip(result.sequences, _experts(result), strict=True):
            sampled.append(torch.tensor(answer.logprobs))
            rendered = _followed(base, probe.rendered, answer.tokens)
            longer = Probe(_following(base, rendered, experts), probe.adapter)
            again.append(_logprobs(base, [longer])[0][-len(answer.tokens) :])
    return sampled, again


def _experts(result: SampleResult) -> list[NDArray[Any] | None]:
    """Return the experts that computed each answer and its prompt; None in a dense model."""
    routes = [None if each is None else each.arrived().experts for each in result.routes]
    return [each if each is not None and each.size else None for each in routes]


def _as_sampled(base: BaseModel, probes: Sequence[Probe], results: Sequence[SampleResult]) -> list[Probe]:
    """Let prompts follow the experts that the sampler chose for them."""
    found = []
    for probe, result in zip(probes, results, strict=True):
        experts = _experts(result)[0]
        own = None if experts is None else experts[:, : len(probe.rendered)]
        found.append(replace(probe, rendered=_following(base, probe.rendered, own)))
    return found


def _request(num_samples: int, prompt_logprobs: bool, max_tokens: int = ANSWER) -> SampleRequest:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, top_p=1.0, top_k=-1, seed=0, stop=StopRule(False, (), ())
    )
    questions = PromptQuestions(logprobs=prompt_logprobs)
    return SampleRequest("", 0, num_samples, [], params, questions, rollout_expert_indices=True)


def _as_sampler(probe: Probe, logprobs: Tensor) -> Tensor:
    """Set image positions to 0.0, as prompt_logprobs has it."""
    return logprobs * torch.from_numpy(probe.rendered.is_text[1:])


def _followed(base: BaseModel, rendered: RenderedInput, tokens: list[int]) -> RenderedInput:
    ids = np.concatenate([rendered.token_ids, np.array(tokens, dtype=np.int32)])
    return RenderedInput(
        ids, rendered.spans, rendered.images, positions(base.family, len(ids), rendered.spans, base.merge_size)
    )
