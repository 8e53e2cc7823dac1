"""Mixtures of experts against a loop over tokens and experts: values and all gradients, with LoRA of several adapters.

Invariant: A mixture of experts is a plain loop in float64, in training and decoding; nothing of a neighbour reaches a
token. Also: `tests/models/test_grouped_product.py`.

Invariant: Experts are chosen as transformers chooses them, ties included, and nothing trains what chooses them.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

from tests.bases import DEVICE, load, random_adapter
from tests.extent import families
from tests.models.test_decoder import wide
from tinsmith.models import batched_lora
from tinsmith.models.base import BaseModel
from tinsmith.models.batched_lora import BareRows, BatchedAdapters
from tinsmith.models.decoder import ExpertMLP, recomputed
from tinsmith.models.experts import ExpertStack, mix_bare
from tinsmith.models.experts import owners_of as owners_of_row
from tinsmith.models.lora import Adapter, Segment, experts_of
from tinsmith.models.packed_lora import SegmentAdapters
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering import packing
from tinsmith.rendering.packing import shared_rows

FAMILIES = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"]

LENGTHS = [5, 4, 6, 2, 3]
"""Of the segments of `owners_of`."""


@pytest.fixture(scope="module")
def base(family_dir: Callable[[str], Path]) -> BaseModel:
    """A model whose experts are computed in float64, where a wrong term cannot hide behind rounding."""
    return wide(family_dir("qwen3_moe"))


def free(chosen: Tensor) -> Tensor:
    """Let the router choose."""
    return chosen


def stack_of(base: BaseModel, layer: int = 1) -> ExpertStack:
    assert base.decoder is not None
    mlp = base.decoder.layers[layer].mlp
    assert isinstance(mlp, ExpertMLP)
    return mlp.stack


def adapters_of(base: BaseModel) -> tuple[Adapter, Adapter, Adapter]:
    """Of ranks 4 and 12, and one that leaves experts bare."""
    return (
        random_adapter(base, rank=4, seed=1, b_scale=0.1),
        random_adapter(base, rank=12, seed=2, b_scale=0.1),
        random_adapter(base, rank=8, seed=3, b_scale=0.1, train_mlp=False),
    )


def segments_of(owners: Sequence[Adapter | None]) -> list[Segment]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [Segment(end - length, end, owner) for length, end, owner in zip(LENGTHS, ends, owners, strict=True)]


def owners_of(base: BaseModel) -> list[Adapter | None]:
    """Two slices of the first adapter, one of the second, one whose adapter leaves experts bare, and the base."""
    first, second, bare = adapters_of(base)
    return [first, None, second, first, bare]


def tokens_of(base: BaseModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(LENGTHS), base.text_config.hidden_size, generator=generator, dtype=torch.float64)
    return hidden.to(DEVICE)


def choice_of(stack: ExpertStack, allowed: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights that do not add up to one and experts of these, of every token, in an order of its own."""
    generator, count = torch.Generator().manual_seed(seed), sum(LENGTHS)
    weights = torch.rand(count, stack.kind.per_token, generator=generator, dtype=torch.float64) + 0.1
    order = torch.rand(count, len(allowed), generator=generator).argsort(1)[:, : stack.kind.per_token]
    return weights.to(DEVICE), torch.tensor(allowed)[order].to(DEVICE)


def loop(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor, segments: Sequence[Segment]) -> Tensor:
    """The formula, token by token and expert by expert."""
    rows = []
    for segment in segments:
        adapter = segment.adapter
        factors = None if adapter is None else experts_of(adapter, stack.name)
        for token in range(segment.start, segment.end):
            x, total = h[token], torch.zeros_like(h[token])
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                gate_matrix, up_matrix = stack.gate_up[expert].chunk(2)
                gate, up = gate_matrix @ x, up_matrix @ x
                if adapter is not None and factors is not None:
                    scale = 32 / adapter.shape.rank
                    gate = gate + scale * factors.gate.b[expert] @ (factors.gate.a @ x)
                    up = up + scale * factors.up.b[expert] @ (factors.up.a @ x)
                inner = silu(gate) * up
                out = stack.down[expert] @ inner
                if adapter is not None and factors is not None:
                    out = out + scale * factors.down.b @ (factors.down.a[expert] @ inner)
                total = total + weight * out
            rows.append(total)
    return torch.stack(rows)


def leaves_of(stack: ExpertStack, segments: Sequence[Segment]) -> dict[str, Tensor]:
    """The matrices of each adapter of these experts, by number of its first segment and name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, segment in enumerate(segments):
        adapter = segment.adapter
        if adapter is not None and id(adapter) not in seen:
            seen.add(id(adapter))
            for name, pair in adapter.working.items():
                if name.startswith(stack.name):
                    found |= {f"{number}.{name}.a": pair.a, f"{number}.{name}.b": pair.b}
    return found


Mix = Callable[[ExpertStack, Tensor, Tensor, Tensor, Sequence[Segment]], Tensor]


def ours(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor, segments: Sequence[Segment]) -> Tensor:
    return SegmentAdapters(segments).mix(stack, h, weights, chosen)


def computed(
    how: Mix, stack: ExpertStack, h: Tensor, choice: tuple[Tensor, Tensor], segments: Sequence[Segment]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of h, of the router's weights, of the experts' and of the adapters' matrices."""
    weights, chosen = choice
    given = {"h": h, "weights": weights, "gate_up": stack.gate_up, "down": stack.down}
    given = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    own = replace(stack, gate_up=given["gate_up"], down=given["down"])
    out = how(own, given["h"], given["weights"], chosen, segments)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype).to(DEVICE)
    given |= leaves_of(stack, segments)
    found = torch.autograd.grad(out, list(given.values()), direction, allow_unused=True)
    return out.detach(), {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(given.items(), found, strict=True)
    }


def assert_equal(some: tuple[Tensor, dict[str, Tensor]], others: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(some[0], others[0], rtol=1e-10, atol=1e-10)
    assert some[1].keys() == others[1].keys()
    for name, gradient in some[1].items():
        torch.testing.assert_close(gradient, others[1][name], rtol=1e-10, atol=1e-10, msg=name)


CHOICES = {"any": (2, list(range(8))), "three": (2, [1, 4, 6]), "one expert": (1, [5]), "two experts": (2, [7, 0])}
"""How many experts compute a token, and which they may be."""


@pytest.mark.parametrize("name", CHOICES)
def test_values_and_all_gradients_are_those_of_a_loop(base: BaseModel, name: str) -> None:
    """An expert without tokens has gradients of zero, and those that have some have none."""
    per_token, allowed = CHOICES[name]
    stack = stack_of(base)
    stack = replace(stack, kind=replace(stack.kind, per_token=per_token))
    segments, h, choice = segments_of(owners_of(base)), tokens_of(base), choice_of(stack, allowed)
    found = computed(ours, stack, h, choice, segments)
    assert_equal(found, computed(loop, stack, h, choice, segments))
    gradients = found[1]
    assert len(gradients) == 4 + 2 * 6
    assert all(gradient.any() for gradient in gradients.values())
    used = sorted(set(choice[1].flatten().tolist()))
    assert used == sorted(allowed)
    for tensor in (tensor for tensor in gradients.values() if tensor.ndim == 3):
        assert all(bool(part.any()) <= (expert in used) for expert, part in enumerate(tensor))
    for tensor in (gradients["gate_up"], gradients["down"]):
        assert [expert for expert, part in enumerate(tensor) if part.any()] == used


@pytest.mark.parametrize("owner", ["nobody", "one adapter", "an adapter that leaves experts bare"])
def test_rows_of_one_owner_are_those_of_a_loop(base: BaseModel, owner: str) -> None:
    first, _, bare = adapters_of(base)
    mine = {"nobody": None, "one adapter": first}.get(owner, bare)
    stack, segments, h = stack_of(base), segments_of([mine] * 5), tokens_of(base)
    choice = choice_of(stack, range(8))
    found = computed(ours, stack, h, choice, segments)
    assert_equal(found, computed(loop, stack, h, choice, segments))
    assert len(found[1]) == 4 + (6 if owner == "one adapter" else 0)
    if owner != "one adapter":
        assert torch.equal(found[0], mix_bare(stack, h, *choice))


NEIGHBOURS = [1, 2, 4]
"""Segments of `owners_of` that are not of the first adapter."""


@pytest.mark.parametrize("change", ["other tokens", "NaN tokens", "NaN adapter", "NaN base row", "infinite tokens"])
def test_nothing_of_a_neighbour_reaches_a_token(base: BaseModel, change: str) -> None:
    """Neither its values nor the gradients of its adapter, of its input and of its router's weights."""
    stack, owners, h = stack_of(base), owners_of(base), tokens_of(base)
    choice, segments = choice_of(stack, range(8)), segments_of(owners)
    out, gradients = computed(ours, stack, h, choice, segments)
    spoiled = [1] if change == "NaN base row" else [2] if change == "NaN adapter" else NEIGHBOURS
    places = torch.cat([torch.arange(segments[number].start, segments[number].end) for number in spoiled])
    if change == "NaN adapter":
        second = owners[2]
        assert second is not None
        second.flat.fill_(torch.nan)
        second.refresh()
    elif change == "other tokens":
        h[places] = tokens_of(base, seed=1)[places]
    else:
        h[places] = torch.inf if change == "infinite tokens" else torch.nan
    again, found = computed(ours, stack, h, choice, segments)
    well = [token for token in range(len(h)) if token not in places.tolist()]
    assert not torch.isclose(again[places], out[places]).any()
    torch.testing.assert_close(again[well], out[well], rtol=1e-12, atol=1e-12)
    for name in ("h", "weights"):
        torch.testing.assert_close(found[name][well], gradients[name][well], rtol=1e-12, atol=1e-12)
    for name in (name for name in gradients if name.startswith("0.")):
        torch.testing.assert_close(found[name], gradients[name], rtol=1e-12, atol=1e-12)
    if change == "NaN base row":
        for name in (name for name in gradients if name.startswith("2.")):
            torch.testing.assert_close(found[name], gradients[name], rtol=1e-12, atol=1e-12)


# Choosing experts


def module_of(base: BaseModel, layer: int = 1) -> Any:
    """The router of transformers."""
    return base.language_model.layers[layer].mlp.gate


def theirs(router: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers of experts, which it returns behind its logits."""
    _, weights, chosen = router(h)
    return weights, chosen


@pytest.mark.parametrize("family", families(FAMILIES))
def test_experts_are_chosen_as_transformers_chooses_them(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    h = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights, chosen = stack_of(base).route(h, free)
    expected, numbers = theirs(module_of(base), h)
    assert torch.equal(chosen, numbers)
    assert torch.equal(weights, expected)
    torch.testing.assert_close(weights.sum(1), torch.ones(200, device=DEVICE))


def test_probabilities_that_are_not_to_be_normalised_are_left(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(family_dir("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    base = load(tmp_path)
    h = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights, chosen = stack_of(base).route(h, free)
    expected, numbers = theirs(module_of(base), h)
    assert torch.equal(chosen, numbers)
    assert torch.equal(weights, expected)
    assert (weights.sum(1) < 0.9).any()


def test_exact_ties_are_decided_as_topk_decides_them(family_base: Callable[[str], BaseModel]) -> None:
    """Every expert has a twin with the same row of the router, and of a token of zeros all are alike."""
    base = family_base("qwen3_moe")
    stack = stack_of(base)
    twins = replace(stack, router=stack.router[:4].detach().round(decimals=1).repeat(2, 1))
    h = torch.randint(-3, 4, (100, 64), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    h[7] = 0
    weights, chosen = twins.route(h, free)
    probabilities = softmax(linear(h, twins.router), -1)
    values, expected = probabilities.topk(2)
    assert (values[:, 0] == values[:, 1]).all()
    assert torch.equal(chosen, expected)
    assert torch.equal(weights, torch.full_like(weights, 0.5))


# Decoding: a row of one token for each sequence


@torch.no_grad()
def test_rows_of_a_decoding_step_are_those_of_a_loop(base: BaseModel) -> None:
    """Of two ranks, an adapter that leaves experts bare and the base, in columns that larger ones had before."""
    stack, (first, second, bare) = stack_of(base), adapters_of(base)
    batched = BatchedAdapters(base.layout, base.device, torch.float64, 256)
    former = random_adapter(base, rank=28, seed=7, b_scale=0.5)
    assert batched.place(former) == (0, 28)
    batched.forget(former)
    columns = {id(None): (0, 0)} | {id(adapter): batched.place(adapter) for adapter in (first, bare, second)}
    assert columns == {id(None): (0, 0), id(first): (0, 4), id(bare): (4, 12), id(second): (12, 24)}
    larger = random_adapter(base, rank=40, seed=8, b_scale=0.5)
    owners = [first, None, second, larger, bare, first, second, None]

    def check() -> None:
        own = torch.tensor([columns.get(id(owner), (24, 24)) for owner in owners], device=DEVICE)
        h, (weights, chosen) = tokens_of(base)[: len(owners)], choice_of(stack, range(8))
        weights, chosen = weights[: len(owners)], chosen[: len(owners)]
        counted = [owner if id(owner) in columns else None for owner in owners]
        segments = [Segment(row, row + 1, owner) for row, owner in enumerate(counted)]
        expected = loop(stack, h, weights, chosen, segments)
        found = batched.for_rows(own).mix(stack, h, weights, chosen)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the scale of rank 12 is rounded to float32
        for row, owner in enumerate(counted):
            alone = batched.for_rows(own[row : row + 1]).mix(
                stack, h[row : row + 1], weights[row : row + 1], chosen[row : row + 1]
            )
            torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-12, atol=1e-12)
            if owner is None or owner is bare:
                plain = BareRows().mix(stack, h[row : row + 1], weights[row : row + 1], chosen[row : row + 1])
                torch.testing.assert_close(alone, plain, rtol=1e-12, atol=1e-12)

    check()
    columns[id(larger)] = batched.place(larger)
    assert columns[id(larger)] == (24, 64)
    assert batched.generation == 2  # what the first buffers held was copied
    check()


@torch.no_grad()
def test_a_row_of_nan_reaches_no_other_row(base: BaseModel) -> None:
    stack, (first, second, _) = stack_of(base), adapters_of(base)
    batched = BatchedAdapters(base.layout, base.device, torch.float64, 64)
    own = torch.tensor([batched.place(first), batched.place(second), (0, 0), batched.place(second)], device=DEVICE)
    h, choice = tokens_of(base)[:4], tuple(tensor[:4] for tensor in choice_of(stack, [2, 3]))
    before = batched.for_rows(own).mix(stack, h, *choice)
    h[1] = torch.nan
    after = batched.for_rows(own).mix(stack, h, *choice)
    assert torch.isnan(after[1]).all()
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]], rtol=1e-12, atol=1e-12)


# What chooses experts is trained by nobody


@pytest.mark.parametrize("family", families(FAMILIES))
@pytest.mark.parametrize("train_mlp", [True, False])
def test_routers_are_among_no_weights_that_train(
    family_base: Callable[[str], BaseModel], family: str, train_mlp: bool
) -> None:
    base = family_base(family)
    parts = {name.split(".", 2)[-1] for name in base.full_targets(LoraShape(0, 0, train_mlp=train_mlp))}
    mlp = {part for part in parts if part.startswith("mlp.")}
    shared = {f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert mlp == (experts | (shared if family == "qwen3_5_moe" else set()) if train_mlp else set())
    adapters = {name.split(".", 2)[-1] for name in random_adapter(base).masters if ".mlp." in name}
    ends = [f"{part}_proj" for part in ("gate", "up", "down")]
    wanted = {f"mlp.experts.{end}" for end in ends}
    assert adapters == wanted | ({f"mlp.shared_expert.{end}" for end in ends} if family == "qwen3_5_moe" else set())
    assert not any(".mlp." in name for name in random_adapter(base, train_mlp=False).masters)


def test_columns_of_experts_take_no_more_than_their_share(
    family_base: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, dense = family_base("qwen3_moe").layout, family_base("qwen3").layout
    # Of each layer gate and up: A of 64, 8 B's of 48. Down: 8 A's of 48, B of 64.
    assert (mixture.expert_widths, dense.expert_widths) == (2 * 3 * (64 + 8 * 48), 0)
    column = mixture.expert_widths * 4
    for held, columns in ((64 * column, 64), (128 * column - 1, 64), (column, 32), (2**31, 512)):
        monkeypatch.setattr(batched_lora, "EXPERT_BYTES", held)
        assert batched_lora.most_columns(mixture, torch.float32) == columns
        assert batched_lora.most_columns(dense, torch.float32) == 512


def test_a_layer_that_is_recomputed_keeps_no_pairs_of_its_first_pass(base: BaseModel) -> None:
    """What the backward reads of them comes from where its other numbers come from: values and routes fit together."""
    stack, segments, h = stack_of(base), segments_of(owners_of(base)), tokens_of(base)
    first, second = choice_of(stack, range(8), seed=0), choice_of(stack, range(8), seed=1)
    choices = iter((first, second))
    h.requires_grad_()
    out = recomputed(lambda x: ours(stack, x, *next(choices), segments), h)
    (found,) = torch.autograd.grad(out.sum(), h)
    (expected,) = torch.autograd.grad(ours(stack, h, *second, segments).sum(), h)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_base_and_adapters_that_leave_experts_bare_are_one_owner(base: BaseModel) -> None:
    """Each owner has matrices of its own in a pass, those of a bare one are zeros."""
    first, second, bare = adapters_of(base)
    stack, h = stack_of(base), tokens_of(base)
    owners = owners_of_row(stack.name, segments_of([first, None, second, first, bare]), {}, h)
    assert [None if own is None else own[0].rank for own in owners.factors] == [4, None, 12]
    assert [number for _, _, number in owners.spans] == [0, 1, 2, 0, 1]
    assert owners.of_tokens is not None
    assert owners.of_tokens.tolist() == [
        n for n, count in zip((0, 1, 2, 0, 1), LENGTHS, strict=True) for _ in range(count)
    ]
    alone = owners_of_row(stack.name, segments_of([None, bare, None, bare, bare]), {}, h)
    assert (alone.factors, alone.of_tokens) == ((None,), None)


def test_a_row_has_no_more_owners_than_a_product_has_groups(
    family_base: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = family_base("qwen3_moe")
    owners = [random_adapter(mixture, rank=2, seed=seed) for seed in range(3)]
    given = [owners[0], owners[1], None, owners[0], owners[2]]
    assert shared_rows(given, mixture.layout) == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(packing, "MOST_GROUPS", 23)  # eight experts of two owners; a third would make 24 groups
    assert shared_rows(given, mixture.layout) == [[0, 1, 3], [2, 4]]
    assert shared_rows(given, family_base("qwen3").layout) == [[0, 1, 2, 3, 4]]


def test_gradients_of_several_owners_hold_no_memory_of_each_other(base: BaseModel) -> None:
    stack, segments, h = stack_of(base), segments_of(owners_of(base)), tokens_of(base)
    leaves = leaves_of(stack, segments)
    out = ours(stack, h, *choice_of(stack, range(8)), segments)
    for name, gradient in zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        if gradient.dim() == 3:
            assert gradient.untyped_storage().nbytes() == gradient.nbytes, name
