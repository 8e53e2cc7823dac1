"""The self-check on decoders of many kinds, and on networks that were made to compute something else.

Invariant: Sequences of a packed row that reach each other, forward or backward, are found before the model is served.

Invariant: A base model that would compute other numbers than transformers, packed or cached, is not served.
Also: `tests/acceptance/test_other_decoders.py`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import OTHER_DECODERS, load, write_decoder
from tests.extent import families, slow
from tests.models.test_decoder import EXPERTS
from tinsmith.errors import ConfigError
from tinsmith.models import vision_tower
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import AttentionBlock, Decoder, ExpertMLP, Layer, Pass
from tinsmith.models.experts import ExpertStack
from tinsmith.models.fused import Normed
from tinsmith.sampling.local.states import StateSlots, StateSteps
from tinsmith.sampling.self_check import LENGTHS, QUICK, check_base_model

Dir = Callable[[str], Path]

KNOWN = ["llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "qwen3_5", *EXPERTS]


@pytest.mark.parametrize("family", families([*KNOWN, *OTHER_DECODERS]))
def test_what_we_serve_passes(family_base: Callable[[str], BaseModel], family: str) -> None:
    for quick in (False, True):
        check_base_model(family_base(family), samples=True, quick=quick)


# The layers of qwen3 and qwen3_vl are those of qwen3_5. What mistral adds, a window, is checked below: one that is left
# out is found.
@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_moe", *slow("qwen3", "qwen3_vl", "mistral", "qwen3_vl_moe", "qwen3_5_moe")]
)
def test_rounding_to_bfloat16_passes(family_dir: Dir, family: str) -> None:
    base = load(family_dir(family), dtype="bfloat16")
    for quick in (False, True):
        check_base_model(base, samples=True, quick=quick)


def test_a_network_whose_linears_see_no_batch_passes(tmp_path: Path) -> None:
    write_decoder("opt", tmp_path, word_embed_proj_dim=64, num_key_value_heads=4)
    check_base_model(load(tmp_path), samples=True)


def test_the_check_leaves_the_model_as_it_was(family_dir: Dir) -> None:
    base = load(family_dir("mistral"), max_context=20)
    before = copy.deepcopy(base.network.config.to_dict())
    check_base_model(base, samples=True)
    assert base.network.config.to_dict() == before
    assert (base.network.config._attn_implementation, base.max_context) == ("tinsmith", 20)


def refused(base: BaseModel, reason: str, samples: bool, quickly: str | None = None) -> None:
    """The model must be refused for that reason, and by the quick form for the reason `quickly`, if given."""
    with pytest.raises(ConfigError, match=reason):
        check_base_model(base, samples=samples)
    if quickly is not None:
        with pytest.raises(ConfigError, match=quickly):
            check_base_model(base, samples=samples, quick=True)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "gemma2",
            {"head_dim": 16, "final_logit_softcapping": None},
            "its attention needs what Tinsmith does not compute: softcap",
        ),
        (
            "gemma3_text",
            {"head_dim": 16, "final_logit_softcapping": 0.5},
            r"other log-probabilities \(final_logit_softcapping=0.5 is",
        ),
        (
            "cohere",
            {"logit_scale": 0.0625},
            r"transformers computes other log-probabilities \(logit_scale=0.0625 is not supported\): off",
        ),
        ("granite", {"logits_scaling": 8.0}, r"\(logits_scaling=8.0 is not supported\): off by .*, allowed is 0.0001"),
        ("stablelm", {}, "its network fails on a packed row: .* 'plan'"),
    ],
)
def test_a_decoder_that_we_do_not_compute_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_decoder(model_type, tmp_path, **settings)
    refused(load(tmp_path), rf"tiny \({model_type}\) cannot be served: .*{reason}", samples=True)


# Faults


@dataclass(frozen=True, eq=False)
class DoctoredLayer(Layer):
    """A layer of our decoder whose MLP passes its output [1, tokens, hidden] through `change`."""

    change: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, delta: Tensor | None, shared: Pass) -> tuple[Tensor, Tensor]:
        x, delta = super().__call__(x, delta, shared)
        return x, self.change(delta.unsqueeze(0)).squeeze(0)


def doctor(base: BaseModel, change: Callable[[Tensor], Tensor], in_transformers: bool = True) -> None:
    """Let the first MLP pass its output [1, tokens, hidden] through `change`, in transformers' module and in ours."""
    if in_transformers:
        base.language_model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: change(output))
    if base.decoder is not None:
        first, *others = base.decoder.layers
        changed = DoctoredLayer(first.block, first.first_norm, first.second_norm, first.mlp, change)
        base.decoder = replace(base.decoder, layers=(changed, *others))


class LeakingBackward(torch.autograd.Function):
    """Nothing forward; backward each token also gets the gradient of the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + grads[0].roll(-1, 0)


leak_backward: Any = LeakingBackward.apply


def one_sequence(own: Any, plan: PackedPlan, layer: int, x: Tensor, *others: Any) -> Any:
    """As if the row were one long sequence."""
    return own(PackedPlan([len(x)], x.device, x.dtype), layer, x, *others)


def leaks_backward(own: Any, plan: PackedPlan, layer: int, *inputs: Any) -> Any:
    return leak_backward(own(plan, layer, *inputs))


def cut_value(
    own: Any, plan: PackedPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, *others: Tensor
) -> Any:
    """A row of several sequences has the right value; its gradient lacks what comes through the delta rule's values."""
    return own(plan, layer, query, key, value.detach() if len(plan.lengths) > 1 else value, *others)


def twice(steps: StateSteps) -> None:
    """What a pass that is tried again after it has changed its states would leave."""
    for layer, index in steps.states.index.items():
        before = steps.states.memory[index, steps.slots]
        steps.states.inputs[index, steps.slots] = steps.inputs[layer]
        steps.states.memory[index, steps.slots] = 2 * steps.memory[layer] - before


def of_plan(operation: str, wrong: Callable[..., Any]) -> Callable[[BaseModel, pytest.MonkeyPatch], None]:
    """A fault of packed passes: `wrong` is given the right function and what that is called with."""
    own = getattr(PackedPlan, operation)
    return lambda _, patch: patch.setattr(PackedPlan, operation, partialmethod(partial(wrong, own)))


TRANSFORMERS = "transformers computes other log-probabilities"
FORWARD = "a sequence (depends on|changes with the tokens of) others in its packed row: "
BACKWARD = "the loss of a sequence has gradients in others of its packed row: off by"
GRADIENTS = "a sequence has other gradients in a packed row than alone: off by"
DEPENDS = "a sequence depends on others in its packed row: off by"
CHANGES = "a sequence changes with the tokens of others in its packed row: off by"

Install = Callable[[BaseModel, pytest.MonkeyPatch], None]

PACKED: dict[str, tuple[str, Install, str, str | None]] = {
    "layers that carry state along the row": (
        "qwen3",
        lambda base, _: doctor(base, lambda x: x + x.roll(1, 1)),
        DEPENDS,
        TRANSFORMERS,
    ),
    "such layers of transformers": (
        "olmo",
        lambda base, _: doctor(base, lambda x: x + x.roll(1, 1)),
        DEPENDS,
        TRANSFORMERS,
    ),
    "a leak below the rounding": (
        "qwen3",
        lambda base, _: doctor(base, lambda x: x + x.roll(1, 1) / 64),
        CHANGES,
        CHANGES,
    ),
    # Convolution and delta rule keep sequences apart each for itself: one of the two is not enough.
    "a convolution of the row": ("qwen3_5", of_plan("convolve", one_sequence), FORWARD, f"{FORWARD}|{TRANSFORMERS}"),
    "a delta rule of the row": ("qwen3_5", of_plan("delta_rule", one_sequence), FORWARD, f"{FORWARD}|{TRANSFORMERS}"),
    "a convolution that leaks backward": (
        "qwen3_5",
        of_plan("convolve", leaks_backward),
        BACKWARD,
        f"{BACKWARD}|{TRANSFORMERS}",
    ),
    "a delta rule that leaks backward": (
        "qwen3_5",
        of_plan("delta_rule", leaks_backward),
        BACKWARD,
        f"{BACKWARD}|{TRANSFORMERS}",
    ),
    "gradients that miss a part": ("qwen3_5", of_plan("delta_rule", cut_value), GRADIENTS, GRADIENTS),
}
"""The family of a spoiled model, how it is spoiled, why it must be refused, and the reason of the quick form."""


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *[(fault, "float32") for fault in PACKED if "rounding" not in fault],
        *[
            (fault, "bfloat16")
            for fault in PACKED
            if fault.startswith(("layers", "a leak", "a convolution of", "a delta rule that"))
        ],
    ],
)
def test_what_reaches_a_neighbour_or_loses_a_gradient(
    family_dir: Dir, monkeypatch: pytest.MonkeyPatch, fault: str, dtype: str
) -> None:
    """It is refused."""
    family, install, reason, quickly = PACKED[fault]
    base = load(family_dir(family), dtype=dtype)
    install(base, monkeypatch)
    refused(base, reason, samples=False, quickly=quickly)


def test_a_model_that_enlarges_rounding_passes_and_a_wrong_one_is_refused(family_dir: Dir) -> None:
    """Its logits are so large that rounding in float32 moves log-probabilities by more than is allowed otherwise."""
    base = load(family_dir("qwen3"))
    base.lm_head.mul_(100)
    check_base_model(base, samples=True)
    doctor(base, lambda output: output * 1.001, in_transformers=False)
    refused(base, TRANSFORMERS, samples=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_that_differs_is_refused(family_dir: Dir, dtype: str) -> None:
    decoded = {len(LENGTHS), len(LENGTHS[QUICK])}
    base = load(family_dir("qwen3"), dtype=dtype)
    doctor(base, lambda output: output * 1.5 if output.shape[1] in decoded else output)
    reason = "decoding with a cache gives other log-probabilities than a full forward pass: off by"
    refused(base, reason, samples=True, quickly=reason)
    check_base_model(base, samples=False)


OF_PROMPTS = "the sampler computes other log-probabilities of a prompt"

SPOILED = {
    "steps that are lost": (StateSteps, "commit", lambda steps: None, OF_PROMPTS),
    "steps that are taken twice": (StateSteps, "commit", twice, OF_PROMPTS),
    "forks without a state": (
        StateSlots,
        "copy",
        lambda states, source, target: None,
        "what goes on from the prefix cache gives other",
    ),
    "saved states that nobody finds": (
        StateSlots,
        "longest",
        lambda states, keys: 0,
        "the sampler finds nothing of a prompt that it has",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_states_that_are_not_those_of_the_tokens_are_refused(
    hybrid_base: BaseModel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    holder, name, instead, reason = SPOILED[what]
    monkeypatch.setattr(holder, name, instead)
    refused(
        hybrid_base, reason, samples=True, quickly="decoding with a cache gives other" if reason == OF_PROMPTS else None
    )


def spoil_first_layer(decoder: Decoder, **changes: Any) -> Decoder:
    """Our decoder with another first layer."""
    first, *others = decoder.layers
    return replace(decoder, layers=(replace(first, **changes), *others))


def spoil_attention(decoder: Decoder, **changes: Any) -> Decoder:
    """Our decoder with another attention in its first layer."""
    block = decoder.layers[0].block
    assert isinstance(block, AttentionBlock)
    return spoil_first_layer(decoder, block=replace(block, **changes))


def spoil_experts(decoder: Decoder, change: Callable[[ExpertStack], ExpertStack]) -> Decoder:
    """Our decoder with other experts in its first layer."""
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    return spoil_first_layer(decoder, mlp=replace(mlp, stack=change(mlp.stack)))


def without_shared_expert(decoder: Decoder) -> Decoder:
    """Our decoder without the shared expert of its first layer."""
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    return spoil_first_layer(decoder, mlp=replace(mlp, shared_expert=None))


WRONG_DECODERS: dict[str, tuple[str, Callable[[Decoder], Decoder]]] = {
    "frequencies": (
        "qwen3",
        lambda d: replace(d, rope=replace(d.rope, inverse_frequencies=d.rope.inverse_frequencies * 1.5)),
    ),
    "no scaling": ("qwen3", lambda d: replace(d, rope=replace(d.rope, scaling=1.1))),
    "rows of positions": ("qwen3_vl", lambda d: replace(d, rope=replace(d.rope, axes=None))),
    "last norm": (
        "qwen3",
        lambda d: replace(d, last_norm=replace(d.last_norm, kind=replace(d.last_norm.kind, zero_centred=True))),
    ),
    "norm of a layer": (
        "qwen3",
        lambda d: spoil_first_layer(d, first_norm=replace(d.layers[0].first_norm, kind=Normed(0.5, False))),
    ),
    "norms of heads": ("qwen3", lambda d: spoil_attention(d, head_weights=None)),
    "scale": ("qwen3", lambda d: spoil_attention(d, scale=0.1)),
    "window": ("mistral", lambda d: spoil_attention(d, window_of=None)),
    "linears": ("qwen3", lambda d: spoil_first_layer(d, mlp=d.layers[1].mlp)),
    "router": ("qwen3_moe", lambda d: spoil_experts(d, lambda own: replace(own, router=own.router.roll(1, 0)))),
    "experts": ("qwen3_moe", lambda d: spoil_experts(d, lambda own: replace(own, down=own.down.roll(1, 0)))),
    "gate and up of experts": (
        "qwen3_moe",
        lambda d: spoil_experts(d, lambda own: replace(own, gate_up=own.gate_up.roll(own.kind.width, 1))),
    ),
    "probabilities of experts": (
        "qwen3_moe",
        lambda d: spoil_experts(d, lambda own: replace(own, kind=replace(own.kind, normalized=False))),
    ),
    "shared expert": ("qwen3_5_moe", without_shared_expert),
}


@pytest.mark.parametrize("what", WRONG_DECODERS)
def test_a_decoder_of_ours_that_computes_something_else_is_refused(family_dir: Dir, what: str) -> None:
    family, spoil = WRONG_DECODERS[what]
    base = load(family_dir(family))
    assert base.decoder is not None
    base.decoder = spoil(base.decoder)
    refused(base, f"{TRANSFORMERS}: off by", samples=False, quickly=f"{TRANSFORMERS}: off by")


@pytest.mark.parametrize("what", ["router", "experts", "gate and up of experts", "probabilities of experts"])
def test_wrong_experts_are_found_in_half_precision_too(family_dir: Dir, what: str) -> None:
    """Where both follow the same experts, so that rounding moves no token to another."""
    family, spoil = WRONG_DECODERS[what]
    base = load(family_dir(family), dtype="bfloat16")
    assert base.decoder is not None
    base.decoder = spoil(base.decoder)
    refused(base, f"{TRANSFORMERS}: off by", samples=False, quickly=f"{TRANSFORMERS}: off by")


def test_routers_that_choose_otherwise_are_found_in_half_precision_too(
    family_dir: Dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no log-probability shows, as the experts are followed."""
    base, plain = load(family_dir("qwen3_moe"), dtype="bfloat16"), ExpertStack.route

    def least(stack: ExpertStack, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        least = (h @ stack.router.t()).topk(stack.kind.per_token, largest=False).indices
        return plain(stack, h, lambda _: choose(least))

    monkeypatch.setattr(ExpertStack, "route", least)
    reason = "transformers chooses other experts: a share of them: off by"
    refused(base, reason, samples=False, quickly=reason)


def test_a_window_that_we_are_not_told_of_is_refused(family_dir: Dir) -> None:
    base = load(family_dir("gemma3_text"))
    base.language_model.layers[0].self_attn.sliding_window = None
    refused(base, f"{TRANSFORMERS}: off by", samples=False)


def unsorted(own: Any, *arguments: Any) -> Any:
    """Windows of the right sizes with the wrong patches."""
    order, lengths = own(*arguments)
    return np.sort(order), lengths


@pytest.mark.parametrize(
    ("family", "part", "fault", "dtype"),
    [
        *[
            ("qwen3_vl", "Spans", lambda own, lengths, *on: own([sum(lengths)], *on), dtype)
            for dtype in ("float32", "bfloat16")
        ],
        ("qwen3_5", "patch_places", lambda own, *arguments: own(*arguments)[::-1], "bfloat16"),
        ("qwen3_vl", "rotate", lambda own, x, *_, **__: x, "bfloat16"),
        ("qwen2_5_vl", "window_order", unsorted, "float32"),  # the tiny model's windows matter too little for bfloat16
    ],
)
def test_a_tower_that_computes_otherwise_is_refused(
    family_dir: Dir, monkeypatch: pytest.MonkeyPatch, family: str, part: str, fault: Any, dtype: str
) -> None:
    monkeypatch.setattr(vision_tower, part, partial(fault, getattr(vision_tower, part)))
    reason = r"cannot be served: transformers computes other features of images, relative to their size: off by \d"
    refused(load(family_dir(family), dtype=dtype), reason, samples=False, quickly=reason)
