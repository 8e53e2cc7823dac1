"""Checks with each set of new weights that vLLM computes what the trainer does.

The canary is a prompt on whose log-probabilities vLLM and the trainer must agree before a client gets a sample. Pixel
values that are normalized twice, or a transfer that is half done, are no error to vLLM, but change these. Probes try
out each new server.
"""

import hashlib
import io
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel, threads_for
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.layout import GROUPS, HEAD_WEIGHT, LM_HEAD
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.vllm.generate import score
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance
from tinsmith.sampling.vllm.launch import has_delta_nets, refusal
from tinsmith.sampling.vllm.loader import LABEL, WeightLoader, once
from tinsmith.sampling.vllm.protocol import RefusedError, ServerFailedError, prompt_answers, scoring_params
from tinsmith.sampling.vllm.weights import WeightFiles
from tinsmith.training.logprobs import head_logits, head_lora
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SamplingParams, StopRule

log = logging.getLogger(__name__)

_TOKENS = 12
"""Text tokens before the image, and behind it."""
_WITHIN_LAYERS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference in nats allowed for rounding within layers; bfloat16 is coarse at random, so unlikely, tokens."""
_ROUNDINGS = 2
"""The trainer rounds its logits to the base's dtype, and vLLM its own."""
Scores = Sequence[dict[str, Any] | None]
"""vLLM's prompt_logprobs of the canary."""
_QUESTIONS = PromptQuestions(logprobs=True)
_PARAMS = SamplingParams(None, 1.0, 1.0, -1, 0, StopRule(eos=False, strings=(), token_ids=()))


@dataclass(frozen=True, eq=False)
class Expectation:
    """The trainer's results for the canary with some weights."""

    logprobs: NDArray[np.float32]
    limit: float
    """Largest mean difference of vLLM's, in nats (`allowed_difference`)."""

    @property
    def is_finite(self) -> bool:
        """False if they cannot be compared: what is infinite or NaN agrees with anything, or with nothing."""
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.limit))


def allowed_difference(logit_size: float, dtype: torch.dtype) -> float:
    """Return the allowed mean difference of logprobs in nats, where the largest logits have this absolute value.

        limit = (0.001 in float32, 0.1 in bfloat16) + 2 * unit * logit_size

    A logit of size x is rounded by up to x * unit, which is x * 2^-8 in bfloat16 (half of `eps`), and the logarithm of
    the sum over the vocabulary is no more exact than its largest logit. Trainer and vLLM each round once. The added
    part is less than a hundredth of the logits, to which the effect of wrong weights is in proportion too.
    """
    return _WITHIN_LAYERS[dtype] + _ROUNDINGS * torch.finfo(dtype).eps / 2 * logit_size


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """Weights to sample from at vLLM servers, with what a server must compute with them."""

    weights: Weights | None
    canary: Expectation
    ref: WeightsRef

    @property
    def full(self) -> FullWeights | None:
        """Full weights that replace the base's, if they are of that kind."""
        return self.weights if isinstance(self.weights, FullWeights) else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter over the base's weights, if they are of that kind."""
        return self.weights if isinstance(self.weights, Adapter) else None

    def __str__(self) -> str:
        kind = {Adapter: "adapter", FullWeights: "full weights"}.get(type(self.weights))
        return f"{kind} {self.ref.label}" if kind else "the base weights"


def score_prompt(
    base: BaseModel,
    rendered: RenderedInput,
    weights: Weights | None,
    scores: PromptScores,
    chunk: int,
    look_at: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Let the trainer's model answer what `scores` asks about a prompt; returns the logits [1, vocabulary] behind it.

    Logits [positions, vocabulary] exist for `chunk` positions at a time; `look_at` is given them.
    """
    head, lora = base.head(weights), head_lora(weights)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = head_logits(hidden, head, *lora)
        if look_at is not None:
            look_at(found)
        return found

    with torch.no_grad(), threads_for(base, len(rendered)):
        row = pack([rendered], [weights], base.device)
        hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))
        scores.add(0, hidden, logits, chunk)
        return head_logits(hidden[-1:], head, *lora)


class Canary:
    """The canary prompt of one base model: random tokens, with an image among them where the model takes images."""

    def __init__(self, base: BaseModel, renderer: Renderer) -> None:
        self.base = base
        tokens = np.random.default_rng(0).integers(0, base.vocab_size, 2 * _TOKENS).astype(np.int32)
        image: list[Chunk] = [_image()] if base.family.takes_images else []
        self.rendered = renderer.render([TextChunk(tokens[:_TOKENS]), *image, TextChunk(tokens[_TOKENS:])])
        self.text = self.rendered.is_text.copy()
        self.text[0] = False

    def expected(self, weights: Weights | None) -> Expectation:
        """Compute the canary with the trainer's model, in the trainer's thread."""
        scores = PromptScores(self.rendered, _QUESTIONS, _PARAMS, 0)
        sizes: list[torch.Tensor] = []
        score_prompt(
            self.base,
            self.rendered,
            weights,
            scores,
            len(self.rendered),
            lambda logits: sizes.append(logits.abs().amax(-1)),
        )
        assert scores.answers.logprobs is not None
        limit = allowed_difference(float(torch.cat(sizes).mean()), self.base.dtype)
        return Expectation(scores.answers.logprobs[self.text], limit)

    async def scored_by(self, instance: Instance, model: str | None) -> Scores:
        """Let a server score the canary with the weights or the adapter of this name."""
        scores: Scores = (await score(instance, self.rendered, scoring_params(0), model))["prompt_logprobs"]
        return scores

    def compare(self, scores: Scores, expected: Expectation, what: str) -> None:
        """Raise TinsmithError if a server's canary scores differ from the trainer's, or these are not all finite."""
        if not expected.is_finite:
            raise TinsmithError(
                f"the trainer itself computes infinite or NaN log-probabilities with {what}, so vLLM cannot be "
                "compared with it; nothing is sampled from these weights: go back to an earlier checkpoint, and train "
                "on with a lower learning rate"
            )
        difference = self.difference(scores, expected)
        if not difference <= expected.limit:
            raise TinsmithError(
                f"vLLM computes other log-probabilities than the trainer with {what}: {difference:.4g} nats apart on "
                f"average on {len(expected.logprobs)} tokens, where {expected.limit:.3g} is the limit; nothing is "
                "sampled from these weights"
            )

    def difference(self, scores: Scores, expected: Expectation) -> float:
        """Return the mean difference of a server's canary scores from the trainer's, in nats; NaN if one of them is."""
        got = prompt_answers(scores, self.rendered, _QUESTIONS).logprobs
        assert got is not None
        return float(np.abs(got[self.text] - expected.logprobs).mean())


def _image() -> ImageChunk:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(file, "PNG")
    return ImageChunk(hashlib.sha256(file.getvalue()).digest(), file.getvalue(), "png", None)


# Probes: adapters that each change one kind of layer as much as its own weights do, tried once on each new instance of
# a server.
#
# If a server leaves out a part of an adapter, that is no error to vLLM, and changes less than rounding while the
# adapter has learned little. Where a server differs from the trainer with a probe, adapters that reach such layers are
# sent there merged into the base's weights.

_SIZE = 2.0
"""Size of a probe's change of a weight, as a multiple of the weight's (Frobenius norms)."""
_APPLIED = 0.5
"""A probe is applied if the log-probabilities are off by less than this part of what it changes them by."""


@dataclass(frozen=True, eq=False)
class AdapterProbe:
    """An adapter of rank 1 that changes the layers of one kind only."""

    kind: str
    """Such as `linear_attn.in_proj_qkv.q`: the names of its targets without the number of the layer."""
    adapter: Adapter
    expected: Expectation
    """The trainer's results with it."""
    bare: Expectation
    """The same with the base's weights alone."""

    @property
    def change(self) -> float:
        return float(np.abs(self.expected.logprobs - self.bare.logprobs).mean())

    @property
    def allowed(self) -> float:
        """Largest mean difference from the expected, in nats, of a server that applies it."""
        return max(_APPLIED * self.change, self.expected.limit)

    def is_shown_by(self, difference: float) -> bool:
        """Return whether a server that differs by so much on average applies it. What is not finite shows nothing."""
        return self.expected.is_finite and self.bare.is_finite and difference <= self.allowed


def kind_of(target: str) -> str:
    """Return the kind of a target of LoRA: its name without the number of its layer."""
    parts = [part for part in target.split(".") if not part.isdecimal()]
    return ".".join(parts[1:] or parts)


@torch.no_grad()
def make_probes(canary: Canary, files: WeightFiles) -> list[AdapterProbe]:
    """Make a probe for each kind of layer that LoRA can train, in the trainer's thread."""
    bare = canary.expected(None)
    kinds: dict[str, list[str]] = {}
    for name in canary.base.layout.targets:
        kinds.setdefault(kind_of(name), []).append(name)
    probes = []
    for kind, names in kinds.items():
        adapter = _adapter(files, names)
        probes.append(AdapterProbe(kind, adapter, canary.expected(adapter), bare))
    return probes


def _adapter(files: WeightFiles, names: list[str]) -> Adapter:
    """Make an adapter that changes these targets. It has the others of their group too, as every trained adapter."""
    base = files.base
    group = base.layout.targets[names[0]].group
    shape = LoraShape(1, seed=0, **{f"train_{each}": each == group for each in GROUPS})
    adapter = new_adapter(shape, base.layout, base.device, base.dtype)
    generator = torch.Generator().manual_seed(0)
    for name in names:
        a, b = adapter.masters[name]
        b.copy_(torch.randn(b.shape, generator=generator))
        b.mul_(
            _SIZE
            * torch.linalg.vector_norm(files.base_weight(name), dtype=torch.float32)
            / (adapter.scale * a.norm() * b.norm())
        )
    adapter.refresh()
    return adapter


class TryOut:
    """Finds out once for each instance whether it may be sampled from, and which kinds of layers take adapters."""

    def __init__(
        self, canary: Canary, loader: WeightLoader, served_on: torch.device, probes: Sequence[AdapterProbe]
    ) -> None:
        """Servers compute on devices like `served_on`."""
        self.canary = canary
        self.loader = loader
        self.served_on = served_on
        self.probes = probes

    async def try_out(self, instance: Instance) -> None:
        """Ask an instance which probes it applies, once.

        Nothing is known if that has failed, and the next call asks again. Raises as `Connection.post`, and
        TinsmithError if it differs from the trainer with the base's weights.
        """
        await once(instance.facts, "probes", partial(self._probe, instance))

    async def learn_about(self, instance: Instance) -> None:
        """Ask a server once if it can be sampled from, and the name of its full weights (vLLM 0.26 gives none)."""
        await once(instance.facts, "version", partial(self._ask_version, instance))

    def is_merged(self, instance: Instance, targets: Iterable[str]) -> bool:
        """Return whether an instance takes adapters with these targets merged into the base's weights.

        Full weights have no targets. Raises UserError if it can compute with them in neither way, or is not sampled
        from at all.
        """
        if instance.refusal is not None:
            raise UserError(instance.refusal)
        kinds = {kind_of(target) for target in targets}
        if not kinds & instance.merged_kinds:
            return False
        refused = kinds & instance.refused_kinds
        if LM_HEAD in kinds and self.canary.base.head_name != HEAD_WEIGHT:
            left_out = ", ".join(sorted(kinds & instance.merged_kinds))
            raise UserError(
                f"vLLM applies no adapters to {left_out} of {self.canary.base.name}. They cannot be merged either, "
                "because its output projection is its embedding too: create the model with train_unembed=False, or "
                "serve it with --sampler local"
            )
        if refused:
            raise UserError(
                f"vLLM cannot compute with trained {', '.join(sorted(refused))} of {self.canary.base.name}, as "
                "adapters or merged; serve it with --sampler local"
            )
        return True

    async def _probe(self, instance: Instance) -> None:
        await self.learn_about(instance)
        if instance.refusal is not None:
            log.error("the vLLM server at %s is not sampled from: %s", instance.connection.url, instance.refusal)
            return
        async with instance.weights_lock.holding(BASE, partial(self.loader.replace, instance, None)):
            if self.probes:  # weights that are not the trainer's are left alone: they may be somebody else's
                self.canary.compare(
                    await self.canary.scored_by(instance, None), self.probes[0].bare, "the base weights"
                )
            left_out = [
                probe
                for probe in self.probes
                if not await self._shows(instance, probe, self._as_adapter(instance, probe))
            ]
        instance.merged_kinds = frozenset(probe.kind for probe in left_out)
        for probe in left_out:
            merged = instance.weights_lock.holding(
                f"probe/{probe.kind}", partial(self.loader.replace, instance, probe.adapter)
            )
            if not await self._shows(instance, probe, merged):
                instance.refused_kinds |= {probe.kind}
        if left_out:
            log.warning(
                (
                    "the vLLM server at %s applies no adapters to %s; what trains these is merged into the base's "
                    "weights, or refused with %s"
                ),
                instance.connection.url,
                ", ".join(sorted(instance.merged_kinds)),
                ", ".join(sorted(instance.refused_kinds)) or "none",
            )

    async def _shows(
        self, instance: Instance, probe: AdapterProbe, loaded: AbstractAsyncContextManager[str | None]
    ) -> bool:
        """Return whether a server computes what the trainer does while it has a probe `loaded`.

        One that refuses the probe does not.
        """
        try:
            async with loaded as name:
                scores = await self.canary.scored_by(instance, name)
        except (RefusedError, ServerFailedError, UserError) as error:
            if not await instance.answers():
                raise
            log.info("the vLLM server at %s refuses a probe of %s: %s", instance.connection.url, probe.kind, error)
            return False
        return probe.is_shown_by(self.canary.difference(scores, probe.expected))

    @asynccontextmanager
    async def _as_adapter(self, instance: Instance, probe: AdapterProbe) -> AsyncIterator[str]:
        key = f"probe/{probe.kind}"
        name = await self.loader.load(instance, key, probe.adapter)
        yield name
        await self.loader.take_off(instance, name)
        del instance.adapters[key]

    async def _ask_version(self, instance: Instance) -> None:
        if not instance.started_by_us and has_delta_nets(self.canary.base):
            instance.refusal = refusal(
                self.canary.base, (await instance.connection.get("/version"))["version"], self.served_on
            )
        with suppress(RefusedError):
            instance.label = (await instance.connection.get("/weight_info"))["weight_version"]
        if not instance.started_by_us and (instance.label is None or instance.label.startswith(LABEL)):
            # A process before this one may have left its weights there.
            instance.weights_lock.weights = UNKNOWN
