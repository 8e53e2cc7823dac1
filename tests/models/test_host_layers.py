"""A base model whose layers stay in the host's memory computes what one does that is whole on its device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE, datum, load, on_host, picture_chunks, random_tokens, renderer
from tinsmith.config import Config, DistributedConfig, ModelsConfig, TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.streamed_decoder import StreamedDecoder
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.self_check import check_base_model
from tinsmith.training.backend import LocalBackend
from tinsmith.worker.bases import stays_on_host


def trained(base: BaseModel) -> tuple[list[float], list[Tensor]]:
    """Losses and gradients of LoRA."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=64))
    backend.create_model("m", LoraShape(4, 0))
    make = renderer(base)
    rendered = [make.render([random_tokens(i, 9 + 5 * i)]) for i in range(3)]
    if base.family.takes_images:
        rendered.append(make.render(picture_chunks(base, 1, 8, width=64, height=64)))
    outcome = backend.run_pass([datum("m", each, seed=i) for i, each in enumerate(rendered)], backward=True)
    assert outcome.failures == {}
    return [result.loss for result in outcome.results if result], list(backend.optimizers["m"].gradients or [])


def parameters(base: BaseModel, of_layers: bool) -> list[Tensor]:
    prefix = next(name for name, module in base.network.named_modules() if module is base.language_model) + ".layers."
    return [parameter for name, parameter in base.network.named_parameters() if name.startswith(prefix) == of_layers]


def test_it_passes_the_self_check(family_dir: Callable[[str], Path]) -> None:
    """With layers that come to the device one at a time, also for transformers' modules."""
    base = on_host(family_dir("qwen3_vl"), device=DEVICE)
    check_base_model(base, samples=False)
    assert {parameter.device.type for parameter in parameters(base, of_layers=True)} == {"cpu"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
def test_it_trains_with_the_same_numbers(family: str, family_dir: Callable[[str], Path]) -> None:
    base = on_host(family_dir(family), device=DEVICE)
    losses, gradients = trained(base)
    expected = trained(load(family_dir(family)))
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected[1], strict=True))
    assert {parameter.device.type for parameter in parameters(base, of_layers=True)} == {"cpu"}
    assert {parameter.device.type for parameter in parameters(base, of_layers=False)} == {torch.device(DEVICE).type}


def test_the_self_check_sees_a_layer_that_differs(family_dir: Callable[[str], Path]) -> None:
    """From what transformers' module has."""
    base = on_host(family_dir("qwen3"), device=DEVICE)
    assert isinstance(base.decoder, StreamedDecoder)
    source = base.decoder.source
    own = source.layer
    vars(source)["layer"] = lambda index: replace(own(index), down=own(0).down)
    with pytest.raises(ConfigError, match="transformers computes other log-probabilities"):
        check_base_model(base, samples=False)


@pytest.mark.parametrize(("shard", "stays"), [("none", False), ("weights", True)])
def test_layers_that_are_divided_wait_on_the_host_of_a_cpu(shard: str, stays: bool, family_dir: Callable[[str], Path]) -> None:
    config = Config(models=ModelsConfig(device="cpu"), distributed=DistributedConfig(2, shard))
    assert stays_on_host(str(family_dir("qwen3")), config) == stays


def test_files_are_mapped_and_not_copied(family_dir: Callable[[str], Path]) -> None:
    """Linears that are computed as one lie apart on the host."""
    base = on_host(family_dir("qwen3"), device=DEVICE)
    attention = base.language_model.layers[0].self_attn
    storages = {attention.get_submodule(name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")}
    assert len(storages) == 3
