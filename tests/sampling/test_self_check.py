"""The self-check on decoders of many kinds, and on networks that were made to compute something else.

Invariant: Sequences of a packed row that reach each other, forward or backward, are found before the model is served.

Invariant: A base model that would compute other numbers than transformers, packed or cached, is not served.
Also: `tests/acceptance/test_other_decoders.py`.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.bases import OTHER_DECODERS, load, write_decoder
from tests.extent import families, slow
from tinsmith.errors import ConfigError
from tinsmith.models import vision_tower
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import AttentionBlock, Decoder, Layer, Pass
from tinsmith.models.fused import Normed
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.sampling.local.states import StateSlots, StateSteps
from tinsmith.sampling.self_check import LENGTHS, QUICK, check_base_model

KNOWN = ["llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.mark.parametrize("family", families([*KNOWN, *OTHER_DECODERS]))
def test_what_we_serve_passes(family_base: Callable[[str], BaseModel], family: str) -> None:
    check_base_model(family_base(family), samples=True)
    check_base_model(family_base(family), samples=True, quick=True)


# The layers of qwen3 are those of qwen3_vl. What mistral adds, a window, is checked below: one that is left out is found.
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", *slow("qwen3", "mistral")])
def test_rounding_to_bfloat16_passes(family_dir: Callable[[str], Path], family: str) -> None:
    base = load(family_dir(family), dtype="bfloat16")
    check_base_model(base, samples=True)
    check_base_model(base, samples=True, quick=True)


def test_a_network_whose_linears_see_no_batch_passes(tmp_path: Path) -> None:
    write_decoder("opt", tmp_path, word_embed_proj_dim=64, num_key_value_heads=4)
    check_base_model(load(tmp_path), samples=True)


def refused(base: BaseModel, reason: str, samples: bool = True, quickly: str | None = None) -> None:
    """The model must not be served, for that reason; `quickly` is the reason that the quick form gives, if it finds it too."""
    with pytest.raises(ConfigError, match=reason):
        check_base_model(base, samples=samples)
    if quickly is not None:
        with pytest.raises(ConfigError, match=quickly):
            check_base_model(base, samples=samples, quick=True)


@pytest.mark.parametrize("family", ["qwen3", *slow("qwen3_5")])  # what is allowed is found in the same way for both
def test_a_model_that_enlarges_rounding_passes_and_a_wrong_one_is_refused(family_dir: Callable[[str], Path], family: str) -> None:
    """Its logits are so large that rounding in float32 moves log-probabilities by more than is allowed otherwise."""
    base = doctored(family_dir(family), lambda output: output)
    base.lm_head.mul_(100)
    check_base_model(base, samples=True)
    assert base.decoder is not None
    first, *others = base.decoder.layers
    assert isinstance(first, DoctoredLayer)
    wrong = replace(first, change=lambda output: output * 1.001)  # in our decoder only
    base.decoder = replace(base.decoder, layers=(wrong, *others))
    refused(base, "transformers computes other log-probabilities", samples=False)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": None}, "its attention needs what Tinsmith does not compute: softcap"),
        ("gemma3_text", {"head_dim": 16, "final_logit_softcapping": 0.5}, r"other log-probabilities \(final_logit_softcapping=0.5 is"),
        ("cohere", {"logit_scale": 0.0625}, r"transformers computes other log-probabilities \(logit_scale=0.0625 is not supported\): they"),
        ("granite", {"logits_scaling": 8.0}, r"\(logits_scaling=8.0 is not supported\): they differ by .*, allowed is 0.0001"),
        ("stablelm", {}, "its network fails on a packed row: .* 'plan'"),
    ],
)
def test_what_computes_other_numbers_is_refused(model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_decoder(model_type, tmp_path, **settings)
    refused(load(tmp_path), rf"tiny \({model_type}\) cannot be served: .*{reason}")


@dataclass(frozen=True, eq=False)
class DoctoredLayer(Layer):
    """A layer of our decoder whose MLP passes its output [1, tokens, hidden] through `change`."""

    change: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, delta: Tensor | None, shared: Pass) -> tuple[Tensor, Tensor]:
        x, delta = super().__call__(x, delta, shared)
        return x, self.change(delta.unsqueeze(0)).squeeze(0)


def doctored(directory: Path, change: Callable[[Tensor], Tensor], dtype: str = "float32") -> BaseModel:
    """A model whose first MLP passes its output [1, tokens, hidden] through `change`, in transformers' module and in our decoder."""
    base = load(directory, dtype=dtype)
    mlp: nn.Module = base.language_model.layers[0].mlp
    mlp.register_forward_hook(lambda _module, _inputs, output: change(output))
    if base.decoder is not None:
        first, *others = base.decoder.layers
        changed = DoctoredLayer(first.block, first.first_norm, first.second_norm, first.gate_up, first.down, change)
        base.decoder = replace(base.decoder, layers=(changed, *others))
    return base


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("olmo", "float32")])
def test_layers_that_carry_state_along_the_row_are_refused(family_dir: Callable[[str], Path], family: str, dtype: str) -> None:
    base = doctored(family_dir(family), lambda output: output + output.roll(1, dims=1), dtype)
    refused(base, "a sequence depends on others in its packed row: they differ by", quickly="transformers computes other log-probabilities")


def test_a_leak_below_the_rounding_is_refused(family_dir: Callable[[str], Path]) -> None:
    base = doctored(family_dir("qwen3"), lambda output: output + output.roll(1, dims=1) / 64, "bfloat16")
    reason = "a sequence changes with the tokens of others in its packed row: by"
    refused(base, reason, samples=False, quickly=reason)


class LeakingBackward(torch.autograd.Function):
    """Nothing forward; backward each token also gets the gradient of the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + grads[0].roll(-1, 0)


leak_backward: Any = LeakingBackward.apply

LEAKS: dict[str, tuple[Callable[..., Any], str]] = {
    "one long sequence": (
        lambda own, plan, layer, x, *others: own(PackedPlan([len(x)], x.device, x.dtype), layer, x, *others),
        "a sequence (depends on|changes with the tokens of) others in its packed row: ",
    ),
    "backward": (
        lambda own, plan, layer, *inputs: leak_backward(own(plan, layer, *inputs)),
        "the loss of a sequence has gradients in others of its packed row: by",
    ),
}


@pytest.mark.parametrize(
    ("leak", "operation", "dtype"),
    [
        *itertools.product(LEAKS, ("convolve", "delta_rule"), ("float32",)),
        ("one long sequence", "convolve", "bfloat16"),
        ("backward", "delta_rule", "bfloat16"),
        *slow(("one long sequence", "delta_rule", "bfloat16"), ("backward", "convolve", "bfloat16")),  # each of the two above crosses these
    ],
)
def test_a_plan_that_ignores_where_sequences_begin_or_leaks_backward_is_refused(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, leak: str, operation: str, dtype: str
) -> None:
    """Convolution and delta rule keep sequences apart each for itself: one of the two is not enough."""
    wrong, reason = LEAKS[leak]
    monkeypatch.setattr(PackedPlan, operation, partialmethod(partial(wrong, getattr(PackedPlan, operation))))
    refused(load(family_dir("qwen3_5"), dtype=dtype), reason, samples=False, quickly=f"{reason}|transformers computes other log-prob")


def test_an_adapter_whose_gradients_miss_a_part_is_refused(family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a row with several sequences is right, its gradient lacks what comes through the values of the delta rule."""
    own = PackedPlan.delta_rule

    def cut(plan: PackedPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        several = len(plan.lengths.lengths) > 1
        return own(plan, layer, query, key, value.detach() if several else value, *others)

    base = load(family_dir("qwen3_5"))
    monkeypatch.setattr(PackedPlan, "delta_rule", cut)
    reason = "a sequence has other gradients in a packed row than alone: by"
    refused(base, reason, samples=False, quickly=reason)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_that_differs_is_refused(family_dir: Callable[[str], Path], dtype: str) -> None:
    decoded = {len(LENGTHS), len(LENGTHS[QUICK])}
    base = doctored(family_dir("qwen3"), lambda output: output * 1.5 if output.shape[1] in decoded else output, dtype)
    reason = "decoding with a cache gives other log-probabilities than a full forward pass: they differ by"
    refused(base, reason, quickly=reason)
    check_base_model(base, samples=False)


def twice(steps: StateSteps) -> None:
    """What a pass that is tried again after it has changed its states would leave."""
    for layer, index in steps.states.index.items():
        before = steps.states.memory[index, steps.slots]
        steps.states.inputs[index, steps.slots] = steps.inputs[layer]
        steps.states.memory[index, steps.slots] = 2 * steps.memory[layer] - before


OF_PROMPTS = "the sampler computes other log-probabilities of a prompt"

SPOILED = {
    "steps that are lost": ("commit", lambda steps: None, OF_PROMPTS),
    "steps that are taken twice": ("commit", twice, OF_PROMPTS),
    "forks without a state": ("copy", lambda states, source, target: None, "what goes on from the prefix cache gives other"),
    "saved states that nobody finds": ("longest", lambda states, keys: 0, "the sampler finds nothing of a prompt that it has computed"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_states_that_are_not_those_of_the_tokens_are_refused(
    family_base: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, instead, reason = SPOILED[what]
    monkeypatch.setattr(StateSteps if name == "commit" else StateSlots, name, instead)
    refused(family_base("qwen3_5"), reason, quickly="decoding with a cache gives other" if reason == OF_PROMPTS else None)


def spoil_first_layer(decoder: Decoder, **changes: Any) -> Decoder:
    """Our decoder with another first layer."""
    first, *others = decoder.layers
    return replace(decoder, layers=(replace(first, **changes), *others))


def spoil_attention(decoder: Decoder, **changes: Any) -> Decoder:
    """Our decoder with another attention in its first layer."""
    block = decoder.layers[0].block
    assert isinstance(block, AttentionBlock)
    return spoil_first_layer(decoder, block=replace(block, **changes))


WRONG_DECODERS: dict[str, tuple[str, Callable[[Decoder], Decoder]]] = {
    "frequencies": ("qwen3", lambda d: replace(d, rope=replace(d.rope, inverse_frequencies=d.rope.inverse_frequencies * 1.5))),
    "no scaling": ("qwen3", lambda d: replace(d, rope=replace(d.rope, scaling=1.1))),
    "rows of positions": ("qwen3_vl", lambda d: replace(d, rope=replace(d.rope, axes=None))),
    "last norm": ("qwen3", lambda d: replace(d, last_norm=replace(d.last_norm, kind=replace(d.last_norm.kind, zero_centred=True)))),
    "norm of a layer": ("qwen3", lambda d: spoil_first_layer(d, first_norm=replace(d.layers[0].first_norm, kind=Normed(0.5, False)))),
    "norms of heads": ("qwen3", lambda d: spoil_attention(d, head_weights=None)),
    "scale": ("qwen3", lambda d: spoil_attention(d, scale=0.1)),
    "window": ("mistral", lambda d: spoil_attention(d, window_of=None)),
    "linears": ("qwen3", lambda d: spoil_first_layer(d, gate_up=d.layers[1].gate_up)),
}


@pytest.mark.parametrize("what", WRONG_DECODERS)
def test_a_decoder_of_ours_that_computes_something_else_is_refused(family_dir: Callable[[str], Path], what: str) -> None:
    family, spoil = WRONG_DECODERS[what]
    base = load(family_dir(family))
    assert base.decoder is not None
    base.decoder = spoil(base.decoder)
    reason = "transformers computes other log-probabilities: they differ by"
    refused(base, reason, samples=False, quickly=reason)


def test_a_window_that_we_are_not_told_of_is_refused(family_dir: Callable[[str], Path]) -> None:
    base = load(family_dir("gemma3_text"))
    base.language_model.layers[0].self_attn.sliding_window = None
    refused(base, "transformers computes other log-probabilities: they differ by")


def test_the_check_leaves_the_model_as_it_was(family_dir: Callable[[str], Path]) -> None:
    base = load(family_dir("mistral"), max_context=20)
    before = copy.deepcopy(base.network.config.to_dict())
    check_base_model(base, samples=True)
    assert base.network.config.to_dict() == before
    assert base.network.config._attn_implementation == "tinsmith"
    assert base.max_context == 20


# The tower


def one_span(own: Any, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Any:
    """As if all pictures were one."""
    return own([sum(lengths)], device, dtype)


def across(own: Any, grid: tuple[int, int, int], merge: int) -> Any:
    """Rows for columns."""
    return own(grid, merge)[::-1]


def unsorted(own: Any, grid: tuple[int, int, int], merge: int, window: int) -> Any:
    """Windows of the right sizes with the wrong patches."""
    order, lengths = own(grid, merge, window)
    return np.sort(order), lengths


def unturned(own: Any, x: Tensor, *angles: Tensor, **settings: object) -> Tensor:
    """No rotation."""
    return x


@pytest.mark.parametrize(
    ("family", "part", "fault", "dtype"),
    [
        ("qwen3_vl", "Spans", one_span, "float32"),
        ("qwen3_vl", "Spans", one_span, "bfloat16"),
        ("qwen3_5", "patch_places", across, "float32"),
        ("qwen3_5", "patch_places", across, "bfloat16"),
        ("qwen3_vl", "rotate", unturned, "float32"),
        ("qwen3_vl", "rotate", unturned, "bfloat16"),
        ("qwen2_5_vl", "window_order", unsorted, "float32"),  # the tiny model's windows matter too little for bfloat16
    ],
)
def test_a_tower_that_computes_otherwise_is_refused(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, part: str, fault: Any, dtype: str
) -> None:
    own = getattr(vision_tower, part)
    monkeypatch.setattr(vision_tower, part, lambda *arguments, **settings: fault(own, *arguments, **settings))
    reason = r"cannot be served: transformers computes other features of pictures: they differ by \d"
    refused(load(family_dir(family), dtype=dtype), reason, samples=False, quickly=reason)
