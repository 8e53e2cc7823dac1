"""Log-probabilities and gradients against transformers + PEFT, LM head in the adapter and B far from zero."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.bases import OTHER_DECODERS, datum, picture_chunks, random_adapter, random_tokens, renderer, shifted
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer

TEXT_FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
VISION_FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def peft_twin(directory: Path, base: BaseModel, adapter: Adapter) -> Any:
    """The same model and adapter, in transformers and PEFT."""
    auto = AutoModelForImageTextToText if base.family.takes_images else AutoModelForCausalLM
    network = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    targets = [path_in_network(base, name) for name in adapter.masters]
    config = LoraConfig(r=adapter.shape.rank, lora_alpha=32, target_modules=targets, lora_dropout=0.0)
    twin = get_peft_model(network, config)
    with torch.no_grad():
        for target, pair in zip(targets, adapter.masters.values(), strict=True):
            module: Any = network.get_submodule(target)
            module.lora_A["default"].weight.copy_(pair.a)
            module.lora_B["default"].weight.copy_(pair.b)
    return twin.eval()


def path_in_network(base: BaseModel, name: str) -> str:
    """What transformers calls an adapter's module."""
    paths: dict[int, str] = {id(module): path for path, module in base.network.named_modules()}
    if name == LM_HEAD:
        return paths[id(base.network.get_output_embeddings())]
    return f"{paths[id(base.language_model)]}.{name}"


def twin_logprobs(twin: Any, base: BaseModel, rendered: RenderedInput, targets: np.ndarray) -> torch.Tensor:
    """Log-probabilities of the targets by transformers' own outer forward."""
    ids = torch.from_numpy(rendered.token_ids).long().unsqueeze(0)
    extra = {}
    if rendered.pictures:
        extra["pixel_values"] = torch.cat([picture.pixel_values for picture in rendered.pictures])
        extra["image_grid_thw"] = torch.tensor([picture.grid_thw for picture in rendered.pictures])
        extra["mm_token_type_ids"] = (ids == base.config.image_token_id).int()
    logits = twin(input_ids=ids, **extra).logits[0]
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.from_numpy(targets).unsqueeze(-1)).squeeze(-1)
    return logprobs


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *VISION_FAMILIES, *OTHER_DECODERS])
def test_logprobs_and_gradients_equal_peft(family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], family: str) -> None:
    base = family_base(family)
    adapter = random_adapter(base, rank=4, seed=1)
    backend = LocalBackend(base, TrainingConfig())
    backend.optimizers["a"] = ModelOptimizer(adapter)
    render = renderer(base)
    inputs = [render.render([random_tokens(1, 21)]), render.render([random_tokens(2, 13)])]
    if base.family.takes_images:
        inputs += [render.render([*picture_chunks(base, 3, 6), *picture_chunks(base, 5, 8, width=64, height=128)])]
    work = [datum("a", rendered, seed) for seed, rendered in enumerate(inputs)]
    results = backend.run_pass(work, backward=True).results

    twin = peft_twin(family_dir(family), base, adapter)
    loss = torch.zeros(())
    for item, result in zip(work, results, strict=True):
        expected = twin_logprobs(twin, base, item.rendered, shifted(item.rendered))
        assert result is not None
        np.testing.assert_allclose(result.logprobs, expected.detach().numpy(), atol=1e-4)
        loss = loss - (torch.from_numpy(item.loss_inputs["weights"]) * expected).sum()

    loss.backward()
    gradients = iter(backend.optimizers["a"].gradients or [])
    for name in adapter.masters:
        module = twin.base_model.model.get_submodule(path_in_network(base, name))
        for matrix in (module.lora_A["default"].weight, module.lora_B["default"].weight):
            scale = matrix.grad.abs().max().item()
            torch.testing.assert_close(next(gradients).cpu(), matrix.grad, rtol=1e-3, atol=1e-4 * max(1.0, scale))
