"""Sizes of models whose LoRA parameters Tinker publishes (the cookbook's `hyperparam_utils.py`); ours must agree.

`tests/recipes/test_published_counts.py` compares the numbers with the cookbook's own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

_LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
_QWEN3_5: dict[str, Any] = {
    "vocab_size": 248_320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
}


def _sizes(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}


def _llama(*sizes: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(**_LLAMA, **_sizes(*sizes), tie_word_embeddings=tied)


def _qwen3(*sizes: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(**_QWEN3, **_sizes(*sizes), tie_word_embeddings=tied)


def _qwen3_5(*sizes: int, value_heads: int, tied: bool) -> Qwen3_5Config:
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(sizes[2])]
    text = (
        _QWEN3_5
        | _sizes(*sizes)
        | {"linear_num_value_heads": value_heads, "layer_types": types, "tie_word_embeddings": tied}
    )
    return Qwen3_5Config(text_config=text, vision_config={"out_hidden_size": sizes[0]}, tie_word_embeddings=tied)


def _experts(count: int, per_token: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": width}


def _qwen3_moe(hidden: int, layers: int, heads: int, width: int) -> dict[str, Any]:
    return (
        _QWEN3
        | _sizes(hidden, 3 * hidden, layers, heads)
        | _experts(128, 8, width)
        | {"num_key_value_heads": 4, "tie_word_embeddings": False}
    )


def _qwen3_5_moe(hidden: int, layers: int, heads: int, value_heads: int, experts: dict[str, Any]) -> Qwen3_5MoeConfig:
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    text = _QWEN3_5 | _sizes(hidden, hidden, layers, heads) | experts
    text |= {
        "num_key_value_heads": 2,
        "linear_num_value_heads": value_heads,
        "layer_types": types,
        "shared_expert_intermediate_size": experts["moe_intermediate_size"],
        "tie_word_embeddings": False,
    }
    return Qwen3_5MoeConfig(text_config=text, vision_config={"out_hidden_size": hidden}, tie_word_embeddings=False)


def _gpt_oss(layers: int, experts: int) -> GptOssConfig:
    """In MXFP4, as the published configuration says."""
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
    config.quantization_config = {"quant_method": "mxfp4"}
    return config


@dataclass(frozen=True)
class Published:
    """A model that is served here."""

    config: Any
    """A transformers configuration with its sizes."""
    attn: int
    """Parameters of an adapter of rank 1, by group."""
    mlp: int
    unembed: int

    @property
    def counts(self) -> dict[str, int]:
        """What `tinsmith plan --rank 1 --json` must say."""
        return {"attn": self.attn, "mlp": self.mlp, "unembed": self.unembed}

    def write(self, directory: Path) -> Path:
        """Write the configuration, and nothing else, to a directory."""
        self.config.save_pretrained(directory)
        return directory


_LLAMA_8B = Published(_llama(4096, 14_336, 32, 32, tied=False), 851_968, 1_769_472, 132_352)
_LLAMA_70B = Published(_llama(8192, 28_672, 80, 64, tied=False), 4_096_000, 8_847_360, 136_448)
_QWEN3_8B = Published(_qwen3(4096, 12_288, 36, 32, tied=False), 958_464, 1_769_472, 156_032)
_QWEN3_5_9B = Published(_qwen3_5(4096, 12_288, 32, 16, value_heads=32, tied=False), 1_130_496, 1_572_864, 252_416)
_QWEN3_5_27B = Published(_qwen3_5(5120, 17_408, 64, 24, value_heads=48, tied=False), 2_965_504, 4_325_376, 253_440)
_QWEN3_30B = _qwen3_moe(2048, 48, 32, 768)
_QWEN3_235B = _qwen3_moe(4096, 94, 64, 1536)
_QWEN3_30B_A3B = Published(Qwen3MoeConfig(**_QWEN3_30B), 835_584, 14_450_688, 153_984)
_QWEN3_235B_A22B = Published(Qwen3MoeConfig(**_QWEN3_235B), 3_176_448, 56_598_528, 156_032)
_QWEN3_5_35B_A3B = Published(_qwen3_5_moe(2048, 40, 16, 32, _experts(256, 8, 512)), 1_013_760, 16_281_600, 250_368)
_QWEN3_5_397B_A17B = Published(_qwen3_5_moe(4096, 60, 32, 64, _experts(512, 10, 1024)), 2_841_600, 96_030_720, 252_416)


def _with_images(text: dict[str, Any], of: Published) -> Published:
    vision = {"out_hidden_size": text["hidden_size"]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Published(config, of.attn, of.mlp, of.unembed)


SERVED = {
    "meta-llama/Llama-3.2-1B": Published(_llama(2048, 8192, 16, 32, tied=True), 212_992, 491_520, 130_304),
    "meta-llama/Llama-3.2-3B": Published(_llama(3072, 8192, 28, 24, tied=True), 573_440, 946_176, 131_328),
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen/Qwen3-4B-Instruct-2507": Published(_qwen3(2560, 9728, 36, 32, tied=True), 737_280, 1_327_104, 154_496),
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "Qwen/Qwen3-32B": Published(_qwen3(5120, 25_600, 64, 64, tied=False), 2_490_368, 5_898_240, 157_056),
    "Qwen/Qwen3.5-4B": Published(_qwen3_5(2560, 9216, 32, 16, value_heads=32, tied=True), 897_024, 1_130_496, 250_880),
    "Qwen/Qwen3.5-9B": _QWEN3_5_9B,
    "Qwen/Qwen3.5-9B-Base": _QWEN3_5_9B,
    "Qwen/Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.6-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.8-27B": _QWEN3_5_27B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B_A3B,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _QWEN3_235B_A22B,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _with_images(_QWEN3_30B, _QWEN3_30B_A3B),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _with_images(_QWEN3_235B, _QWEN3_235B_A22B),
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B_A3B,
    "Qwen/Qwen3.5-35B-A3B-Base": _QWEN3_5_35B_A3B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_5_35B_A3B,
    "Qwen/Qwen3.5-397B-A17B": _QWEN3_5_397B_A17B,
    "openai/gpt-oss-20b": Published(_gpt_oss(24, 32), 497_664, 6_842_880, 203_968),
    "openai/gpt-oss-120b": Published(_gpt_oss(36, 128), 746_496, 40_124_160, 203_968),
}

REFUSED = {
    "deepseek-ai/DeepSeek-V3.1": "deepseek_v3",
    "deepseek-ai/DeepSeek-V3.1-Base": "deepseek_v3",
}
"""Mixtures of experts that transformers knows, by architecture."""

UNKNOWN = ("deepseek-ai/DeepSeek-V4", "moonshotai/", "nvidia/", "thinkingmachines/", "zai-org/")
"""How the names of others begin: mixtures of experts with code of their own, or layers that Tinsmith lacks."""


def write_architecture(model_type: str, directory: Path) -> Path:
    """Write a configuration of this architecture, with transformers' own sizes, and nothing else."""
    AutoConfig.for_model(model_type).save_pretrained(directory)
    return directory
