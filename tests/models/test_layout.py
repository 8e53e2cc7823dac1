"""What LoRA covers and what is computed together, from a configuration as from a loaded model; adapters, all of whose matrices lie so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bases import DEVICE, new_ref, random_adapter
from tinsmith.models.base import BaseModel
from tinsmith.models.families import empty_network
from tinsmith.models.layout import LM_HEAD, read_layout, side_by_side
from tinsmith.models.lora import Adapter, LoraPair, new_adapter
from tinsmith.protocol.shapes import LoraShape

FAMILIES = ["qwen3", "phi3", "gpt_neox", "qwen3_vl", "qwen3_5"]
SHAPES = [LoraShape(4, 0), LoraShape(1, 0, train_unembed=False), LoraShape(2, 0, train_attn=False), LoraShape(2, 0, train_mlp=False)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_configuration_alone_tells_what_an_adapter_covers(
    family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    shutil.copy(family_dir(model_type) / "config.json", tmp_path)
    base, layout = family_base(model_type), read_layout(str(tmp_path))
    assert layout == base.layout
    assert list(layout.targets) == list(base.layout.targets)
    for shape in SHAPES:
        adapter = new_adapter(shape, layout, torch.device("cpu"), torch.float32)
        assert list(adapter.masters) == list(layout.covered(shape))
        assert adapter.parameter_count == layout.lora_parameters(shape)
        for name in adapter.masters.keys() - {"lm_head"}:
            assert name in base.language_model.get_submodule(layout.targets[name].module).projection.targets


def shared(prefix: str, name: str, *modules: str) -> dict[str, tuple[str, ...]]:
    return {f"{prefix}.{name}": tuple(f"{prefix}.{module}" for module in modules)}


JOINED = {
    "qwen3": shared("self_attn", "qkv", "q_proj", "k_proj", "v_proj") | shared("mlp", "gate_up", "gate_proj", "up_proj"),
    "qwen3_5": shared("self_attn", "qkv", "q_proj", "k_proj", "v_proj")
    | shared("linear_attn", "in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    | shared("mlp", "gate_up", "gate_proj", "up_proj"),
    "phi3": {},
    "gpt_neox": {},
}
"""Which linears of a decoder layer read the same input, and what they are called together."""


@pytest.mark.parametrize("model_type", JOINED)
def test_linears_that_read_the_same_input_are_one_projection(family_base: Callable[[str], BaseModel], model_type: str) -> None:
    base = family_base(model_type)
    layout = base.layout
    found = {name.split(".", 2)[2]: projection for name, projection in layout.projections.items() if len(projection.modules) > 1}
    assert {name: tuple(module.split(".", 2)[2] for module in one.modules) for name, one in found.items()} == JOINED[model_type]
    plain = base.family.language_model(empty_network(base.name, base.family, base.config))
    linears = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert sorted(module for one in layout.projections.values() for module in one.modules) == sorted((*linears, "lm_head"))
    assert all(one.name == name == one.modules[0] for name, one in layout.projections.items() if len(one.modules) == 1)
    assert list(layout.projections)[-1] == "lm_head"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_target_is_found_in_the_rows_of_its_projection(family_base: Callable[[str], BaseModel], model_type: str) -> None:
    """What a projection computes in one multiplication is, in the rows of each target, what the target's own linear computes."""
    base = family_base(model_type)
    weights = {name: base.head(None) if name == "lm_head" else base.language_model.get_submodule(name).weight for name in modules(base)}
    seen: list[str] = []
    for projection in base.layout.projections.values():
        joined = torch.cat([weights[module] for module in projection.modules])
        assert joined.shape == (projection.out_features, projection.in_features)
        rows = list(projection.targets.values())
        assert rows == sorted(rows)
        for name, (start, end) in projection.targets.items():
            target = base.layout.targets[name]
            assert torch.equal(joined[start:end], weights[target.module][slice(*(target.rows or (None, None)))])
            seen.append(name)
    assert sorted(seen) == sorted(base.layout.targets)


def modules(base: BaseModel) -> list[str]:
    return [module for projection in base.layout.projections.values() for module in projection.modules]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_matrices_of_a_projection_are_views(family_base: Callable[[str], BaseModel], model_type: str, backwards: bool) -> None:
    base = family_base(model_type)
    adapter = random_adapter(base, rank=3)
    if backwards:  # a checkpoint may hold them in any order
        adapter = Adapter(adapter.shape, dict(reversed(adapter.masters.items())), adapter.dtype)
    for projection in base.layout.projections.values():
        if not projection.targets:
            continue
        stacked = adapter.stacked(projection)
        assert stacked is not None
        assert stacked.names == tuple(projection.targets)
        assert torch.equal(stacked.a, torch.cat([adapter.masters[name].a for name in projection.targets]).to(adapter.dtype))
        places = [(group.first + i, group.start + i * group.width, group.width) for group in stacked.groups for i in range(group.targets)]
        assert places == [(number, start, end - start) for number, (start, end) in enumerate(projection.targets.values())]
        of_each = [b for group in stacked.groups for b in group.b.view(group.targets, group.width, 3)]
        for name, b in zip(projection.targets, of_each, strict=True):
            assert torch.equal(b, adapter.masters[name].b.to(adapter.dtype))
        for view in (stacked.a, *(group.b for group in stacked.groups)):
            assert view.untyped_storage().data_ptr() == adapter.flat_working.untyped_storage().data_ptr()
            assert not view.requires_grad
    grouped = side_by_side(base.layout.targets)
    assert grouped == [list(projection.targets) for projection in base.layout.projections.values() if projection.targets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_follow_their_buffers(text_base: BaseModel, dtype: torch.dtype) -> None:
    adapter = new_adapter(LoraShape(2, seed=0), text_base.layout, torch.device(DEVICE), dtype)
    frozen = adapter.snapshot(new_ref())
    stacks = {name: adapter.stacked(projection) for name, projection in text_base.layout.projections.items()}
    before = [leaf.detach().clone() for leaf in (*frozen.tensors(), *frozen.leaves())]
    adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(1)))
    adapter.refresh()
    assert all(torch.equal(leaf, master.to(dtype)) for leaf, master in zip(adapter.leaves(), adapter.tensors(), strict=True))
    for name, projection in text_base.layout.projections.items():
        stacked = stacks[name]
        assert stacked is not None
        assert torch.equal(stacked.a, torch.cat([adapter.working[target].a for target in projection.targets]))
        b = torch.cat([group.b.flatten() for group in stacked.groups])
        assert torch.equal(b, torch.cat([adapter.working[target].b.flatten() for target in projection.targets]))
    assert all(torch.equal(a, b) for a, b in zip((*frozen.tensors(), *frozen.leaves()), before, strict=True))
    assert adapter.nbytes == adapter.parameter_count * (4 if dtype == torch.float32 else 6)
    assert adapter.parameter_count == sum(tensor.numel() for tensor in adapter.tensors())


def test_an_adapter_copies_what_it_is_made_of(text_base: BaseModel) -> None:
    pairs = {"up": LoraPair(torch.ones(2, 5), torch.ones(4, 2)), LM_HEAD: LoraPair(torch.ones(2, 5), torch.ones(9, 2))}
    adapter = Adapter(LoraShape(2, 0), dict(pairs), torch.float32)
    pairs["up"].a.zero_()
    assert all(tensor.eq(1).all() for tensor in adapter.tensors())
    assert adapter.stacked(text_base.layout.projections["layers.0.mlp.gate_up"]) is None


def test_neighbours_of_one_size_are_one_group(text_base: BaseModel) -> None:
    """Gate and up; keys and values, which are narrower than queries here."""
    stacked = {name: random_adapter(text_base).stacked(own) for name, own in text_base.layout.projections.items()}
    counts = {name.rpartition(".")[2]: [group.targets for group in own.groups] for name, own in stacked.items() if own is not None}
    assert (counts["qkv"], counts["gate_up"], counts["down_proj"]) == ([1, 2], [2], [1])


def test_one_seed_gives_the_numbers_that_it_always_gave(text_base: BaseModel) -> None:
    """A is drawn module by module in the order of the layout, whatever its place in the buffer."""
    adapter = new_adapter(LoraShape(2, seed=7), text_base.layout, torch.device(DEVICE), torch.float32)
    generator = torch.Generator().manual_seed(7)
    for name, target in text_base.layout.targets.items():
        bound = target.in_features**-0.5
        drawn = torch.empty(2, target.in_features).uniform_(-bound, bound, generator=generator)
        assert torch.equal(adapter.masters[name].a.cpu(), drawn)
        assert not adapter.masters[name].b.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_the_same_on_another_device(text_base: BaseModel, dtype: torch.dtype) -> None:
    """Under its identity: it is one snapshot, wherever it lies."""
    trained = random_adapter(text_base)
    taken = Adapter(trained.shape, trained.masters, dtype, device=torch.device(DEVICE)).snapshot(new_ref())
    there = taken.on(torch.device("cpu", 0))
    assert there is not taken
    assert (there.ref, there.scale, there.shape) == (taken.ref, taken.scale, taken.shape)
    for name, pair in taken.working.items():
        for one, other in zip(pair, there.working[name], strict=True):
            assert (other.device.type, other.dtype) == ("cpu", dtype)
            assert torch.equal(one.cpu(), other)
    assert taken.on(taken.flat.device) is taken
