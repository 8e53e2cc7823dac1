"""A base model whose layers stay in the host's memory computes what one does that is whole on its device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.bases import DEVICE, datum, on_host, picture_chunks, random_tokens, renderer
from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig, TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights
from tinsmith.models.streamed_decoder import StreamedDecoder
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.self_check import check_base_model
from tinsmith.sampling.vllm.verify import score_prompt
from tinsmith.training.backend import LocalBackend
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SamplingParams, StopRule
from tinsmith.worker.bases import load_compared, stays_on_host


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


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_it_trains_with_the_same_numbers(family: str, family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel]) -> None:
    base = on_host(family_dir(family), device=DEVICE)
    losses, gradients = trained(base)
    expected = trained(family_base(family))
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected[1], strict=True))
    assert {parameter.device.type for parameter in parameters(base, of_layers=True)} == {"cpu"}
    assert {parameter.device.type for parameter in parameters(base, of_layers=False)} == {torch.device(DEVICE).type}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_other_weights_stand_in_the_place_of_the_bases(
    family: str, family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel]
) -> None:
    """All of them, or some: what is not there is the base's. The base has its own behind them."""
    bases = [on_host(family_dir(family), device=DEVICE), family_base(family)]

    def logprobs(base: BaseModel, owner: FullWeights | None) -> NDArray[np.float32]:
        chunks = picture_chunks(base, 1, 8, width=64, height=64) if base.family.takes_images else [random_tokens(1, 12)]
        rendered = renderer(base).render(chunks)
        scores = PromptScores(rendered, PromptQuestions(logprobs=True), SamplingParams(None, 1.0, 1.0, -1, 0, StopRule(False, (), ())), 0)
        score_prompt(base, rendered, owner, scores, 64)
        assert scores.answers.logprobs is not None
        return scores.answers.logprobs

    def owned(base: BaseModel, shape: LoraShape) -> FullWeights:
        generator = torch.Generator().manual_seed(3)
        changed = {
            name: parameter.cpu() + 0.1 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in sorted(base.full_targets(shape).items())
        }
        return FullWeights(shape, {name: tensor.to(base.device) for name, tensor in changed.items()}, base.dtype)

    bare = [logprobs(base, None) for base in bases]
    np.testing.assert_array_equal(bare[0], bare[1])
    for shape in (LoraShape(0, 0), LoraShape(0, 0, train_mlp=False)):
        on_hosts, whole = (logprobs(base, owned(base, shape)) for base in bases)
        np.testing.assert_allclose(on_hosts, whole, atol=1e-5)
        assert np.abs(whole - bare[0])[1:].max() > 0.1
    np.testing.assert_array_equal(logprobs(bases[0], None), bare[0])


def test_it_passes_the_self_check_which_sees_a_layer_that_differs(family_dir: Callable[[str], Path]) -> None:
    """From what transformers' module has. Layers come to the device one at a time, also for transformers' modules."""
    base = on_host(family_dir("qwen3_vl"), device=DEVICE)
    check_base_model(base, samples=False)
    assert {parameter.device.type for parameter in parameters(base, of_layers=True)} == {"cpu"}
    assert isinstance(base.decoder, StreamedDecoder)
    source = base.decoder.source
    own = source.layer
    vars(source)["layer"] = lambda index: replace(own(index), down=own(0).down)
    with pytest.raises(ConfigError, match="transformers computes other log-probabilities"):
        check_base_model(base, samples=False)


def test_the_worker_that_has_vllm_servers_keeps_a_whole_copy_of_what_it_divides(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, and in the precision that is served. Workers that sample nothing have none; one that the host has no room for is refused."""
    directory = family_dir("qwen3")
    base = on_host(directory)

    def config(shard: str = "weights", sampler: str = "vllm", dtype: str = "float32") -> Config:
        models, sampling = ModelsConfig(device="cpu", dtype=dtype), SamplingConfig(sampler=sampler)
        return Config([f"tiny={directory}"], models=models, distributed=DistributedConfig(2, shard), sampling=sampling)

    assert [stays_on_host(str(directory), config(shard)) for shard in ("none", "weights")] == [False, True]
    copy = load_compared(config(), {"tiny": base})["tiny"]
    assert (copy.device.type, copy.dtype, copy.name) == ("cpu", torch.float32, "tiny")
    assert copy.computed_fingerprint is base.computed_fingerprint
    assert isinstance(copy.decoder, StreamedDecoder)
    assert copy.decoder is not base.decoder
    assert load_compared(config(dtype="bfloat16"), {"tiny": base})["tiny"].dtype == torch.bfloat16
    assert load_compared(config(sampler="none"), {"tiny": base}) == {}
    monkeypatch.setattr("tinsmith.worker.bases.free_memory", lambda device: 1000)
    refused = r"^--shard weights and --sampler vllm: the copies of tiny .* need [\d.]+ [KM]iB of the host's memory, of which 1000 bytes are"
    with pytest.raises(ConfigError, match=refused):
        load_compared(config(), {"tiny": base})
