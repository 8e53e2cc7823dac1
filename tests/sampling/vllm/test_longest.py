"""How long a sequence fits at a server, from configurations alone."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig

from tinsmith.config import Config, load
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import empty_network, layout_of
from tinsmith.sampling.vllm.launch import longest_sequence, sizes_of

GIB = 2**30
CONTEXT = 262_144
LENGTHS = [("--max-model-len=4096", 4096), ("--max_model_len=32K", 32768), ("--max-model-len=8k", 8000)]


def config_of(*vllm: str, **options: Any) -> Config:
    return load(options={"base_models": ["qwen=Qwen/Qwen3-VL-8B-Instruct"], "vllm_args": list(vllm), **options})


@pytest.fixture(scope="module")
def qwen3_vl_8b(vision_base: BaseModel) -> BaseModel:
    """Qwen3-VL-8B without its weights."""
    text: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": CONTEXT,
    }
    vision: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    network = empty_network(vision_base.family, config)
    layout, head = layout_of("qwen", vision_base.family, network), network.lm_head.weight
    return replace(vision_base, config=config, network=network, layout=layout, lm_head=head, max_context=CONTEXT, dtype=torch.bfloat16)


def test_what_fits_is_chosen_and_said(qwen3_vl_8b: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On one GPU of 80 GiB, with the share that docs/vllm.md names. The whole context would take more than the share by itself."""
    assert sum(p.numel() for p in qwen3_vl_8b.network.parameters()) == 8_767_123_696
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    cache_per_token = 2 * 36 * 8 * 128 * 2
    assert cache_per_token * CONTEXT > 0.4 * 80 * GIB
    with caplog.at_level(logging.INFO):
        longest = longest_sequence(qwen3_vl_8b, config_of("--gpu-memory-utilization=0.4"), (0,))
    assert longest == 38_912
    said = "vLLM servers of tiny take sequences of up to 38912 of 262144 tokens: more do not fit into 32.0 GiB of a GPU"
    assert said in caplog.text


def test_two_gpus_hold_more(qwen3_vl_8b: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the weights, and of the heads of keys and values."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    config = config_of("--gpu-memory-utilization=0.4", vllm_tensor_parallel=2)
    assert longest_sequence(qwen3_vl_8b, config, (1, 2)) > 2 * 38_912


@pytest.mark.parametrize(
    ("passed", "context"), [("--max-model-len=4096", 4096), ("--max_model_len=32K", 32768), ("--max-model-len=8k", 8000)]
)
def test_a_length_that_is_passed_on_counts(qwen3_vl_8b: BaseModel, passed: str, context: int) -> None:
    """Requests are refused by it, not by vLLM."""
    assert longest_sequence(qwen3_vl_8b, config_of(passed), (0,)) == context


@pytest.mark.parametrize("passed", ["--max-model-len=auto", "--max-model-len=-1", "--max-model-len=300K"])
def test_a_length_that_is_none_or_too_much_is_refused(qwen3_vl_8b: BaseModel, passed: str) -> None:
    with pytest.raises(ConfigError, match="give a number of tokens from 1 to the model's context of 262144"):
        longest_sequence(qwen3_vl_8b, config_of(passed), (0,))


def test_a_gpu_that_does_not_hold_the_weights_is_refused(qwen3_vl_8b: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GIB))
    with pytest.raises(ConfigError, match=r"has 9.6 GiB of a GPU .* with 16.3 GiB of weights .*: no sequence of 1024 tokens fits in"):
        longest_sequence(qwen3_vl_8b, config_of("--gpu-memory-utilization=0.4"), (0,))


def test_gated_delta_nets_keep_a_state_and_no_cache(hybrid_base: BaseModel) -> None:
    """Of four layers one attends, with 2 heads of 32; the others have 128 channels before 3 taps and 4 heads of 16 by 16."""
    sizes = sizes_of(hybrid_base.layout.layers, 0, 0, torch.float32)
    assert sizes.cache_per_token == 2 * 2 * 32 * 4
    assert sizes.state == 3 * 4 * (3 * 128 + 4 * 16 * 16)


def test_a_cpu_server_has_its_cache(qwen3_vl_8b: BaseModel, text_base: BaseModel) -> None:
    assert longest_sequence(qwen3_vl_8b, config_of(kv_cache_gib=2.0), ()) == 14_336
    assert longest_sequence(text_base, config_of(), ()) == text_base.max_context
