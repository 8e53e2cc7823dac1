"""One description of what LoRA covers, from a configuration as from a loaded model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import read_layout
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
            assert name in base.language_model.get_submodule(layout.targets[name].module).columns


def test_sizes_have_the_context_that_the_model_will_have(family_dir: Callable[[str], Path]) -> None:
    source = str(family_dir("qwen3"))
    limit = json.loads((family_dir("qwen3") / "config.json").read_text())["max_position_embeddings"]
    assert [size_of(source, ModelsConfig(max_context=wanted)).max_context for wanted in (0, 77)] == [limit, 77]
    with pytest.raises(ConfigError, match=f"max_context={limit + 1} is more than .* was built for: {limit} tokens"):
        size_of(source, ModelsConfig(max_context=limit + 1))
