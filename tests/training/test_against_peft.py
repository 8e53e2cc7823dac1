"""Log-probabilities and gradients against transformers + PEFT, LM head in the adapter and B far from zero.

Invariant: Logprobs and gradients equal transformers + PEFT, LM head included, for every family and sixteen other decoders.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.bases import OTHER_DECODERS, datum, picture_chunks, random_adapter, random_tokens, renderer, shifted, transformers_model
from tests.extent import families
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


LENGTHS_OF_HYBRIDS = [1, 2, 3, 4, 63, 64, 65, 4096]
"""Around the taps of a convolution and the chunks of a delta net, and many chunks."""


def peft_twin(directory: Path, base: BaseModel, adapter: Adapter, **options: Any) -> Any:
    """The same model and adapter, in transformers and PEFT. Parts of a layer are the blocks of one adapter whose B is block-diagonal."""
    network = transformers_model(directory, **options)
    rank, layers = adapter.shape.rank, layers_of_adapter(base, adapter)
    joined = {path: len(names) for path, names in layers.items() if len(names) > 1}
    config = LoraConfig(
        r=rank,
        lora_alpha=32,
        rank_pattern={path: count * rank for path, count in joined.items()},
        alpha_pattern={path: count * 32 for path, count in joined.items()},
        target_modules=list(layers),
        lora_dropout=0.0,
    )
    twin = get_peft_model(network, config)
    with torch.no_grad():
        for path, names in layers.items():
            module: Any = network.get_submodule(path)
            module.lora_A["default"].weight.copy_(torch.cat([adapter.masters[name].a for name in names]))
            module.lora_B["default"].weight.copy_(torch.block_diag(*(adapter.masters[name].b for name in names)))
    return twin.eval()


def layers_of_adapter(base: BaseModel, adapter: Adapter) -> dict[str, list[str]]:
    """The adapter's names by what transformers calls their layer: several of one that has adapters on its parts."""
    layers: dict[str, list[str]] = {}
    for name in adapter.masters:
        layers.setdefault(path_in_network(base, base.layout.targets[name].module), []).append(name)
    return layers


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


@pytest.mark.parametrize("family", families([*FAMILIES, *OTHER_DECODERS]))
def test_logprobs_and_gradients_equal_peft(family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], family: str) -> None:
    base = family_base(family)
    adapter = random_adapter(base, rank=4, seed=1)
    backend = LocalBackend(base, TrainingConfig())
    backend.optimizers["a"] = ModelOptimizer(adapter)
    render = renderer(base)
    lengths = LENGTHS_OF_HYBRIDS if family == "qwen3_5" else [21, 13]
    inputs = [render.render([random_tokens(seed, length)]) for seed, length in enumerate(lengths)]
    if base.family.takes_images:
        inputs[1:1] = [render.render([*picture_chunks(base, 3, 6), *picture_chunks(base, 5, 70, width=64, height=128)])]
        inputs.append(render.render(picture_chunks(base, 9, 5)))
    work = [datum("a", rendered, seed) for seed, rendered in enumerate(inputs)]
    results = backend.run_pass(work, backward=True).results

    twin = peft_twin(family_dir(family), base, adapter, attn_implementation="sdpa" if max(lengths) > 1000 else "eager")
    loss = torch.zeros(())
    for item, result in zip(work, results, strict=True):
        expected = twin_logprobs(twin, base, item.rendered, shifted(item.rendered))
        assert result is not None
        np.testing.assert_allclose(result.logprobs, expected.detach().numpy(), atol=1e-4)
        loss = loss - (torch.from_numpy(item.loss_inputs["weights"]) * expected).sum()

    loss.backward()
    gradients = iter(backend.optimizers["a"].gradients or [])
    ours = {name: (next(gradients).cpu(), next(gradients).cpu()) for name in adapter.masters}
    for path, names in layers_of_adapter(base, adapter).items():
        module = twin.base_model.model.get_submodule(path)
        of_a, of_b = (matrix["default"].weight.grad for matrix in (module.lora_A, module.lora_B))
        sizes = [base.layout.targets[name].out_features for name in names]
        blocks = [rows.split(4, dim=1)[index] for index, rows in enumerate(of_b.split(sizes))]  # beside them are PEFT's zeros alone
        for name, *theirs in zip(names, of_a.split(4), blocks, strict=True):
            for mine, wanted in zip(ours[name], theirs, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4 * max(1.0, wanted.abs().max().item()))
