"""Models of published shapes with random bfloat16 weights, made on the device: none are downloaded, read or written.

Only a small tokenizer, a configuration and image settings are written, because loading wants them.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from benchmarks.gpu.measuring import DEVICE, TINY
from tinsmith.config import ModelsConfig
from tinsmith.models.base import BaseModel, load_base_model

CONTEXT = 262144
"""Also for Qwen3, whose published configuration says 40,960: what a step costs does not depend on it."""

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN3_1_7B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN3_8B["tie_word_embeddings"] = False
_QWEN3_5_4B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
_QWEN3_6_27B = _QWEN3_5_4B | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
}
_QWEN3_6_27B |= {"linear_num_value_heads": 48, "tie_word_embeddings": False}
_QWEN3_30B_A3B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_GPT_OSS_20B: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
_QWEN3_6_35B_A3B = _QWEN3_5_4B | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_SMALL_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SMALL_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}

TEXT_SHAPES: dict[str, dict[str, Any]] = {
    "8B": _QWEN3_8B,
    "4B": _QWEN3_4B,
    "1.7B": _QWEN3_1_7B,
    "Qwen3.5-4B": _QWEN3_5_4B,
    "Qwen3.6-27B": _QWEN3_6_27B,
    "VL-4B": _QWEN3_4B,
    "30B-A3B": _QWEN3_30B_A3B,
    "30B-A3B/16": _QWEN3_30B_A3B | {"num_hidden_layers": 16},
    "35B-A3B": _QWEN3_6_35B_A3B,
    "gpt-oss-20b": _GPT_OSS_20B,
}
"""Behind a slash: so many layers of it."""
_SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_HYBRID = ("Qwen3.5-4B", "Qwen3.6-27B", "35B-A3B")
"""Of gated delta nets and attention."""


def configuration(shape: str, **changes: Any) -> Any:
    """The transformers configuration of a shape of `TEXT_SHAPES`, with some values of its language model changed."""
    text = TEXT_SHAPES[shape]
    if TINY:
        text = text | _SMALL | {"num_hidden_layers": 4 if shape in _HYBRID else 2}
    small = (_SMALL_EXPERTS if "num_experts" in text else {}) if TINY else {}
    if shape in _HYBRID:
        kind = "qwen3_5_moe_text" if "num_experts" in text else "qwen3_5_text"
        return AutoConfig.for_model(kind, **text | (_SMALL_DELTA if TINY else {}) | small | changes)
    if shape == "VL-4B":
        sections = [8, 4, 4] if TINY else [24, 20, 20]
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": sections}
        vision = _VISION | (_SMALL_VISION if TINY else {})
        return Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope} | changes, vision_config=vision, tie_word_embeddings=True
        )
    if "num_local_experts" in text:
        return GptOssConfig(**text | ({"num_local_experts": 8} if TINY else {}) | changes)
    if "num_experts" in text:
        return Qwen3MoeConfig(**text | small | changes)
    return Qwen3Config(**text | changes)


def network_of(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of transformers on the device."""
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if config.get_text_config() is not config else AutoModelForCausalLM
    with torch.device(DEVICE):
        network: Any = kind.from_config(config, dtype=dtype)
    return network


def base_of(
    config: Any,
    network: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    memory_share: float = 1.0,
    deterministic: bool = False,
    expert_dtype: str = "model",
) -> BaseModel:
    """A base model of this configuration: of that network of transformers, which it changes, or of a new random one.

    `memory_share` is the part of the GPU's memory that it may take; the others are as the server's options.
    """
    directory = write_surroundings(config, Path(tempfile.mkdtemp()))
    network = network_of(config, dtype) if network is None else network
    precision: Any = str(dtype).removeprefix("torch.")
    models = ModelsConfig(DEVICE, precision, expert_dtype, memory_share, deterministic=deterministic)
    return load_base_model("bench", str(directory), models, 2**30, network=network)


def write_surroundings(config: Any, directory: Path) -> Path:
    """What a model's directory holds beside the weights.

    The ids of images are those of the small tokenizer, also in `config`.
    """
    from tinsmith.models.tiny import write_tiny_model  # not above: it imports kernels, and they touch CUDA

    images = config.get_text_config() is not config
    write_tiny_model("qwen3-vl" if images else "qwen3", directory)
    (directory / "model.safetensors").unlink()
    if images:
        small = AutoConfig.from_pretrained(directory)
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            setattr(config, name, getattr(small, name))
    config.save_pretrained(directory)
    return directory


def flops_per_token(config: Any, lengths: list[int], all_weights: bool) -> float:
    """FLOPs of a training step per token, as the share of the card's matmul rate counts them.

    Of every parameter that a token is multiplied with, of experts those of the chosen ones: 2 forward, 2 for the
    gradient of its input, and 2 more for its own where all weights are trained; the LM head once, the embedding's
    lookup and whatever is computed a second time never. Causal attention beside that: half of two products of each
    query head with all tokens of the sequence, or of its window, forward, and as much again for each of the other
    passes. The delta rule of hybrid layers is left out.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    gated = 2 if text.model_type == "qwen3_5_text" else 1  # its query projection also gives a gate
    mlp = 3 * text.hidden_size * text.intermediate_size
    if text.model_type == "qwen3_moe":
        mlp = text.hidden_size * (3 * text.num_experts_per_tok * text.moe_intermediate_size + text.num_experts)
    if text.model_type == "gpt_oss":
        mlp = text.hidden_size * (3 * text.num_experts_per_tok * text.intermediate_size + text.num_local_experts)
    parameters = text.vocab_size * text.hidden_size + len(kinds) * mlp
    attention = 0.0
    for kind in kinds:
        if kind == "linear_attention":
            key, value = (
                text.linear_num_key_heads * text.linear_key_head_dim,
                text.linear_num_value_heads * text.linear_value_head_dim,
            )
            parameters += text.hidden_size * (2 * key + 3 * value + 2 * text.linear_num_value_heads)
        else:
            parameters += text.hidden_size * (queries * (gated + 1) + 2 * keys)
            window = text.sliding_window if kind == "sliding_attention" else None
            attention += 2 * queries * sum(n * min(n, 2 * (window or n)) for n in lengths) / sum(lengths)
    passes = 3 if all_weights else 2
    return float(passes * (2 * parameters + attention))
