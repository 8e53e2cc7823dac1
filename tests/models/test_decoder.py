"""Our walk through the layers against the transformers modules: hidden states and gradients, and what is not taken
apart.

Its norms are compared with those of transformers alone, its attention with the formula.

Invariant: Our decoder, with all of its pieces, computes what the transformers modules compute, in float64, with
adapters and full weights.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from tests.bases import (
    DEVICE,
    OTHER_EXPERTS,
    image_chunks,
    load,
    random_adapter,
    random_tokens,
    renderer,
    write_decoder,
)
from tests.extent import families
from tinsmith.config import ModelsConfig
from tinsmith.models.attention import FlashAttention, PackedPlan, with_sinks
from tinsmith.models.base import BaseModel, PackedRow, load_base_model
from tinsmith.models.decoder import kept_in_host_memory
from tinsmith.models.families import family_of, read_config
from tinsmith.models.full import Weights, new_full_weights
from tinsmith.models.network import FusedRMSNorm, GatedRMSNorm, ZeroCentredRMSNorm, fuse_norms
from tinsmith.models.read_decoder import read_decoder
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.packing import pack

EXPERTS = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss", *OTHER_EXPERTS]
KNOWN = ["llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", *EXPERTS]

Dirs = Callable[[str], Path]


def wide(directory: Path) -> BaseModel:
    """The model in float64, where a wrong term cannot hide behind rounding."""
    base = load(directory)
    base.network.double()
    if base.layout.experts:
        base.network.set_experts_implementation("eager")  # of the others some compute float32 alone
    decoder = read_decoder(base.family.model_type, base.language_model, base.layout)
    assert decoder is not None
    assert decoder.layers[0].block.output.weight.dtype == torch.float64
    return replace(base, decoder=decoder, dtype=torch.float64)


def row_of(base: BaseModel, owners: Sequence[Weights | None]) -> PackedRow:
    """A row with a sequence for each owner, and images in the first if the model takes them."""
    render = renderer(base)
    inputs = [render.render([random_tokens(seed, 9 + 3 * seed)]) for seed in range(len(owners))]
    if base.family.takes_images:
        inputs[0] = render.render([*image_chunks(base, 3, 6), *image_chunks(base, 5, 4, width=64, height=128)])
    return pack(inputs, owners, base.device)


def run(
    base: BaseModel, owners: Sequence[Weights | None], recompute: int = 0, offload: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of a row, and the gradients of all weights; so many layers are recomputed."""
    row = row_of(base, owners)
    with kept_in_host_memory(len(row.token_ids)) if offload else nullcontext():
        hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype), recompute)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    leaves = [
        leaf
        for owner in {id(owner): owner for owner in owners if owner is not None}.values()
        for leaf in owner.leaves()
    ]
    found = torch.autograd.grad((hidden * direction).sum(), leaves, allow_unused=True)
    return hidden.detach(), [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def assert_close(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], bound: float) -> None:
    """All tensors agree, each relative to its largest number."""
    for one, other in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert (one - other).abs().max() <= bound * max(other.abs().max().item(), 1.0)


@pytest.mark.parametrize("family", families(KNOWN))
def test_adapters_equal_the_modules(family_dir: Dirs, family: str) -> None:
    """Three adapters of different ranks and coverage, two slices of one, and the bare base.

    Angles are float32 in both ways.
    """
    base = wide(family_dir(family))
    first, second = random_adapter(base, rank=4, seed=1), random_adapter(base, rank=8, seed=2)
    third = random_adapter(base, rank=4, seed=3, train_attn=False)
    owners = [first, first, second, third, None]
    assert_close(run(base, owners), run(replace(base, decoder=None), owners), 1e-9)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen2", {}),
        ("qwen3_vl", {}),
        ("qwen3_vl", {"train_attn": False}),
        ("qwen3_5", {}),
        ("qwen3_5", {"train_mlp": False}),
        ("qwen3_moe", {}),
        ("qwen3_5_moe", {}),
        ("qwen3_5_moe", {"train_mlp": False}),
        ("gpt_oss", {}),
        ("gpt_oss", {"train_attn": False}),
    ],
)
def test_full_weights_equal_the_modules(family_dir: Dirs, family: str, shape: dict[str, bool]) -> None:
    base = wide(family_dir(family))
    lora = LoraShape(0, 0, **shape)
    weights = new_full_weights(lora, base.full_targets(lora), torch.float64)
    assert_close(run(base, [weights, weights]), run(replace(base, decoder=None), [weights, weights]), 1e-9)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3", {"hidden_act": "relu"}),
        ("olmo", {}),
        ("smollm3", {"pad_token_id": 0}),
    ],
)
def test_what_it_does_not_know_runs_through_the_modules(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    write_decoder(model_type, tmp_path, **settings)
    assert load(tmp_path).decoder is None


def test_a_model_with_another_module_runs_through_the_modules(
    family_dir: Dirs, caplog: pytest.LogCaptureFixture
) -> None:
    directory, places = str(family_dir("qwen3")), ("", "layers.0", "layers.1.self_attn", "layers.1.mlp")
    family = family_of("tiny", read_config(directory))
    for place in places:
        network = family.auto_class.from_pretrained(directory, dtype=torch.float32)
        family.language_model(network).get_submodule(place).add_module("strange", nn.Identity())
        before = network.state_dict()
        base = load_base_model("tiny", directory, ModelsConfig(device=DEVICE, dtype="float32"), 2**26, network=network)
        assert base.decoder is None
        linear = base.language_model.layers[0].self_attn.q_proj
        assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes  # nothing was joined
        assert list(base.network.state_dict()) == list(before)
    said = [record.message for record in caplog.records if "runs through its transformers modules" in record.message]
    assert ["strange" in line for line in said] == [True] * len(places)


NORMS: list[tuple[type[nn.Module], type[nn.Module]]] = [
    (Qwen3RMSNorm, FusedRMSNorm),
    (GemmaRMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNormGated, GatedRMSNorm),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "ours"), NORMS)
def test_norms_equal_those_of_transformers(theirs: type[nn.Module], ours: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any
    fused: Any
    plain, fused = (nn.ModuleDict({"norm": theirs(48, eps=1e-5)}).to(DEVICE, dtype) for _ in range(2))
    plain["norm"].weight.data.uniform_(0.5, 6)
    fused.load_state_dict(plain.state_dict())
    assert fuse_norms(fused) == 1
    assert type(fused["norm"]) is ours
    inputs = [torch.randn(1, 9, 48).to(DEVICE, dtype).requires_grad_() for _ in range(1 + (ours is GatedRMSNorm))]
    grad = torch.randn(1, 9, 48).to(DEVICE, dtype)

    def answers(norm: nn.Module) -> list[Tensor]:
        out = norm(*inputs)
        return [out, *torch.autograd.grad(out, [*inputs, *norm.parameters()], grad)]

    bound = 4 * torch.finfo(dtype).eps
    for got, expected in zip(answers(fused["norm"]), answers(plain["norm"]), strict=True):
        torch.testing.assert_close(got, expected, rtol=8 * bound, atol=8 * bound)


def test_a_norm_that_computes_something_else_stays() -> None:
    class HalvedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            halved: Tensor = super().forward(hidden_states) / 2
            return halved

    model = nn.ModuleDict({"halved": HalvedRMSNorm(16), "layer": nn.LayerNorm(16)})
    assert fuse_norms(model) == 0
    assert isinstance(model["halved"], HalvedRMSNorm)


HEADS, KV_HEADS = 4, 2


def alone(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention of one sequence written out, shapes as in `PassPlan.attend`."""
    query, key, value = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in (query, key, value))
    distance = torch.arange(query.shape[1], device=DEVICE).unsqueeze(1) - torch.arange(query.shape[1], device=DEVICE)
    unseen = (distance < 0) | (distance >= (window or len(distance)))
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(unseen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(distance), 1)], -1)
    return (scores.softmax(-1)[..., : len(distance)] @ value).transpose(0, 1)


ROWS = {
    "equal, cuDNN": ([600, 600], None, True),
    "one sequence, cuDNN": ([513], None, True),
    "ragged": ([700, 130, 1], None, False),
    "window": ([600, 600], 100, False),
}
"""Lengths, window, and whether a GPU computes them as a batch of equal lengths."""


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5 if DEVICE == "cpu" else 1e-4), (torch.bfloat16, 0.01)]
)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sinks", [False, True])
def test_packed_is_each_alone_and_no_nan_reaches_a_neighbour(
    name: str, sinks: bool, dtype: torch.dtype, bound: float
) -> None:
    """Within 1 % in half precision: bfloat16 keeps numbers to 0.4 %, and what lies between is rounded too.

    The reference is float32 on the same numbers. Heads are as wide as those of published models, so that every kernel
    takes them.
    """
    lengths, window, dense = ROWS[name]
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    sizes = (tokens, HEADS, 64), (tokens, KV_HEADS, 64), (tokens, KV_HEADS, 64), (tokens, HEADS, 64)
    query, key, value, weights = (
        torch.randn(size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in sizes
    )
    rows: tuple[Tensor, ...] = (query, key, value)
    plan = PackedPlan(lengths, torch.device(DEVICE), dtype)
    if sinks:
        rows = (*rows, torch.tensor([0.5, -2.0, 3.0, 6.0]).to(DEVICE, dtype).requires_grad_())
    assert plan.is_dense(window) == dense
    got = plan.attend(0, query, key, value, 0.3, window, *rows[3:] or (None,))
    exact = [x.detach().float().requires_grad_() for x in rows]
    expected = torch.cat(
        [
            alone(q, k, v, 0.3, window, *exact[3:])
            for q, k, v in zip(*(x.split(lengths) for x in exact[:3]), strict=True)
        ]
    )
    found = torch.autograd.grad(got, rows, weights)
    for one, other in zip(
        (got, *found), (expected, *torch.autograd.grad(expected, exact, weights.float())), strict=True
    ):
        # Gradients of sinks are sums over all tokens that nearly cancel
        allowed = 5 * bound if one.dim() == 1 else bound
        assert (one.detach().float() - other.detach()).norm() < allowed * other.detach().norm()
    with torch.no_grad():
        for x in rows[:3]:
            x[: lengths[0]] = torch.nan
    got = plan.attend(0, query, key, value, 0.3, window, *rows[3:] or (None,))
    for x in (got, *torch.autograd.grad(got, rows[:3], torch.ones_like(got))):
        assert torch.isfinite(x[lengths[0] :]).all()


@pytest.mark.parametrize("window", [None, 20])
def test_the_kernel_of_attention_with_sinks_takes_its_arguments(window: int | None) -> None:
    """On a device without memory, forward and backward; what it computes is tested on a GPU above."""
    rows = [torch.empty(50, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [x.requires_grad_() for x in (*rows, torch.empty(HEADS, device="meta", dtype=torch.bfloat16))]
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    out = with_sinks(FlashAttention(bounds, bounds, (40, 40), 0.3, window), *given)
    found = torch.autograd.grad(out, given, torch.empty_like(out))
    assert [x.shape for x in (out, *found)] == [x.shape for x in (given[0], *given)]
