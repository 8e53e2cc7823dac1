"""What LoRA covers and what is computed together, from a configuration as from a loaded model; adapters, all of whose
matrices lie so."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE, new_ref, random_adapter
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import read_layout
from tinsmith.models.lora import adapter_of, new_adapter
from tinsmith.protocol.shapes import LoraShape

FAMILIES = ["qwen3", "phi3", "gpt_neox", "qwen3_vl", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "gpt_oss"]
SHAPES = [
    LoraShape(4, 0),
    LoraShape(1, 0, train_unembed=False),
    LoraShape(2, 0, train_attn=False),
    LoraShape(2, 0, train_mlp=False),
]


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
        experts = {name for name, target in layout.targets.items() if target.experts}
        assert {int(name.split(".")[1]) for name in experts} == set(layout.experts)
        for name in adapter.masters.keys() - {"lm_head"} - experts:
            assert name in base.language_model.get_submodule(layout.targets[name].module).projection.targets


def test_routers_stay_as_they_are_and_a_token_counts_its_own_experts_alone(
    family_base: Callable[[str], BaseModel],
) -> None:
    """Training of all weights takes all but routers; a token is multiplied with 2 of 8 experts."""
    base = family_base("qwen3_5_moe")
    everything = {name for name, _ in base.language_model.named_parameters()}
    gates = {f"layers.{index}.mlp.{gate}.weight" for index in range(4) for gate in ("gate", "shared_expert_gate")}
    assert everything - base.full_targets(LoraShape(0, 0)).keys() == gates
    attention, experts, head = 3 * 64 * 128, 2 * 3 * 64 * 48, 2048 * 64
    assert family_base("qwen3_moe").layout.active_weights == 2 * (attention + experts) + head


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_target_is_found_in_the_rows_of_its_projection(
    family_base: Callable[[str], BaseModel], model_type: str
) -> None:
    """What a projection computes in one multiplication is, in the rows of each target, what the target's own linear
    computes."""
    base = family_base(model_type)
    modules = [name for projection in base.layout.projections.values() for name in projection.modules]
    weights = {
        name: base.head(None) if name == "lm_head" else base.language_model.get_submodule(name).weight
        for name in modules
    }
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
    assert sorted(seen) == sorted(name for name, target in base.layout.targets.items() if not target.experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_passes_read_follows_the_masters_and_a_snapshot_does_not(text_base: BaseModel, dtype: torch.dtype) -> None:
    """All matrices are views of one buffer, in which those of a projection lie together; a checkpoint may hold them in
    any order."""
    drawn = random_adapter(text_base)
    adapter = adapter_of(drawn.shape, dict(reversed(drawn.masters.items())), dtype, device=torch.device(DEVICE))
    frozen = adapter.snapshot(new_ref())
    stacks = {name: adapter.stacked(projection) for name, projection in text_base.layout.projections.items()}
    before = [leaf.detach().clone() for leaf in (*frozen.tensors(), *frozen.leaves())]
    adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(1)))
    adapter.refresh()
    assert all(
        torch.equal(leaf, master.to(dtype)) for leaf, master in zip(adapter.leaves(), adapter.tensors(), strict=True)
    )
    for name, stacked in stacks.items():
        assert stacked is not None
        targets = [adapter.working[target] for target in text_base.layout.projections[name].targets]
        assert torch.equal(stacked.a, torch.cat([pair.a for pair in targets]))
        assert torch.equal(
            torch.cat([group.b.flatten() for group in stacked.groups]),
            torch.cat([pair.b.flatten() for pair in targets]),
        )
    assert all(torch.equal(a, b) for a, b in zip((*frozen.tensors(), *frozen.leaves()), before, strict=True))
    assert adapter.nbytes == adapter.parameter_count * (4 if dtype == torch.float32 else 6)
    assert adapter.parameter_count == sum(tensor.numel() for tensor in adapter.tensors())


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
    taken = adapter_of(trained.shape, trained.masters, dtype, device=torch.device(DEVICE)).snapshot(new_ref())
    there = replace(taken, flat=taken.flat.to(torch.device("cpu", 0)))
    assert there is not taken
    assert (there.ref, there.scale, there.shape) == (taken.ref, taken.scale, taken.shape)
    for name, pair in taken.working.items():
        for one, other in zip(pair, there.working[name], strict=True):
            assert (other.device.type, other.dtype) == ("cpu", dtype)
            assert torch.equal(one.cpu(), other)
