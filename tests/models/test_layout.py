"""One description of what LoRA covers and what is computed together, from a configuration as from a loaded model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import empty_network, read_layout
from tinsmith.models.lora import new_adapter
from tinsmith.models.sizing import size_of
from tinsmith.protocol.shapes import LoraShape

SHAPES = [LoraShape(4, 0), LoraShape(1, 0, train_unembed=False), LoraShape(2, 0, train_attn=False), LoraShape(2, 0, train_mlp=False)]


@pytest.mark.parametrize("model_type", ["qwen3", "phi3", "gpt_neox", "qwen3_vl", "qwen3_5"])
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
    plain = base.family.language_model(empty_network(base.family, base.config))
    linears = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert sorted(module for one in layout.projections.values() for module in one.modules) == sorted((*linears, "lm_head"))
    assert all(one.name == name == one.modules[0] for name, one in layout.projections.items() if len(one.modules) == 1)
    assert list(layout.projections)[-1] == "lm_head"


@pytest.mark.parametrize("model_type", ["qwen3", "phi3", "gpt_neox", "qwen3_vl", "qwen3_5"])
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


def test_sizes_have_the_context_that_the_model_will_have(family_dir: Callable[[str], Path]) -> None:
    source = str(family_dir("qwen3"))
    limit = json.loads((family_dir("qwen3") / "config.json").read_text())["max_position_embeddings"]
    assert [size_of(source, ModelsConfig(max_context=wanted)).max_context for wanted in (0, 77)] == [limit, 77]
    with pytest.raises(ConfigError, match=f"max_context={limit + 1} is more than .* was built for: {limit} tokens"):
        size_of(source, ModelsConfig(max_context=limit + 1))
