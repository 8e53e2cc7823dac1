"""A base model whose layers stay in the host's memory computes what one does that is whole on its device."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.bases import DEVICE, datum, on_host
from tests.training.test_against_peft import examples
from tests.training.test_backend import backend_with, compute, gradients
from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights
from tinsmith.models.streamed_decoder import StreamedDecoder
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.vllm.verify import score_prompt
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SamplingParams, StopRule
from tinsmith.worker.bases import load_compared, stays_on_host


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss"])
def test_it_trains_with_the_same_numbers(
    family: str, family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel]
) -> None:
    base, whole = on_host(family_dir(family), device=DEVICE), family_base(family)
    backends = [backend_with(each, m=4) for each in (base, whole)]
    work = [datum("m", each, seed) for seed, each in enumerate(examples(whole))]
    for one, other in zip(*(compute(backend, work) for backend in backends), strict=True):
        assert one.loss == other.loss
    assert all(
        torch.equal(one, other) for one, other in zip(*(gradients(backend, "m") for backend in backends), strict=True)
    )
    assert {weight.device.type for weight in base.language_model.layers.parameters()} == {"cpu"}
    assert base.head(None).device.type == torch.device(DEVICE).type


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss"])
def test_other_weights_stand_in_the_place_of_the_bases(
    family: str, family_dir: Callable[[str], Path], family_base: Callable[[str], BaseModel]
) -> None:
    """All of them, or some: what is not there is the base's. The base has its own behind them."""
    bases = [on_host(family_dir(family), device=DEVICE), family_base(family)]
    rendered = examples(bases[1])[-1]

    def logprobs(base: BaseModel, owner: FullWeights | None) -> NDArray[np.float32]:
        scores = PromptScores(
            rendered, PromptQuestions(logprobs=True), SamplingParams(None, 1.0, 1.0, -1, 0, StopRule(False, (), ())), 0
        )
        score_prompt(base, rendered, owner, scores, 64)
        assert scores.answers.logprobs is not None
        return scores.answers.logprobs

    bare = [logprobs(base, None) for base in bases]
    np.testing.assert_array_equal(bare[0], bare[1])
    for shape in (LoraShape(0, 0), LoraShape(0, 0, train_mlp=False)):
        generator = torch.Generator().manual_seed(3)
        targets = {name: weight.cpu() for name, weight in sorted(bases[1].full_targets(shape).items())}
        changed = {
            name: (weight + 0.1 * torch.randn(weight.shape, generator=generator)).to(DEVICE)
            for name, weight in targets.items()
        }
        on_hosts, whole = (logprobs(base, FullWeights(shape, dict(changed), base.dtype)) for base in bases)
        np.testing.assert_allclose(on_hosts, whole, atol=1e-5)
        assert np.abs(whole - bare[0])[1:].max() > 0.1
    np.testing.assert_array_equal(logprobs(bases[0], None), bare[0])


def test_the_worker_that_has_vllm_servers_keeps_a_whole_copy_of_what_it_divides(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, and in the precision that is served.

    Workers that sample nothing have none; one that the host has no room for is refused.
    """
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
    refused = (
        r"^--shard weights and --sampler vllm: the copies of tiny .* need [\d.]+ [KM]iB of the host's memory, "
        r"of which 1000 bytes are"
    )
    with pytest.raises(ConfigError, match=refused):
        load_compared(config(), {"tiny": base})


def test_what_would_lose_gradients_is_refused(family_dir: Callable[[str], Path]) -> None:
    decoder = on_host(family_dir("qwen3"), device=DEVICE).decoder
    assert isinstance(decoder, StreamedDecoder)
    source = decoder.with_weights({}).source
    assert source.count == decoder.source.count
    with pytest.raises(TypeError, match="would be lost"):
        source.layer_to_train(0)
