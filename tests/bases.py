"""Tiny base models of every family, and short ways to make datums for them."""

import hashlib
import io
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tinsmith.config import ImagesConfig, ModelsConfig
from tinsmith.models.base import BaseModel, load_base_model
from tinsmith.models.families import IMAGE_FAMILIES
from tinsmith.models.files import EXPERT_MODELS
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.models.network import follow_plans
from tinsmith.models.tiny import DEFAULT_LAYERS, TinyKind, write_tiny_model
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.training.backend import DatumWork
from tinsmith.training.losses import LOSSES
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk

DEVICE = os.environ.get("TINSMITH_TEST_DEVICE", "cpu")
"""Where numerical tests compute; on a GPU with `TINSMITH_TEST_DEVICE=cuda pytest tests/training tests/sampling`."""

EXACT = 1e-4 if DEVICE == "cpu" else 3e-4
"""Most that log-probabilities in float32 may differ. Of pictures in a tiny `qwen3_5_moe`, transformers' own differ by
8e-5 from those in float64; a GPU adds up in an order of its own, too."""

SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with gated delta nets, whose sums are rounded otherwise where a row is packed otherwise."""

OTHER_DECODERS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, "sliding_window": 8},
    "ernie4_5": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "helium": {"head_dim": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "pad_token_id": 0},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "starcoder2": {"sliding_window": 8},
}
"""Dense decoders that Tinsmith has no code for, with settings that differ from `SMALL`."""

OTHER_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
}
"""Mixtures of experts that `tinsmith tiny-model` does not write, likewise."""


def write_decoder(model_type: str, directory: Path, **settings: Any) -> None:
    """A tiny random model of any type that transformers has a decoder for, with the tiny Qwen3 tokenizer."""
    write_tiny_model("qwen3", directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def write_family(model_type: str, directory: Path) -> None:
    """A tiny random model of the family, with the tiny Qwen3 tokenizer."""
    tiny: dict[str, TinyKind] = {kind.replace("-", "_"): kind for kind in DEFAULT_LAYERS}
    if model_type in tiny:
        write_tiny_model(tiny[model_type], directory)
        return
    if model_type in OTHER_DECODERS | OTHER_EXPERTS:
        write_decoder(model_type, directory, **(OTHER_DECODERS | OTHER_EXPERTS)[model_type])
        return
    borrowed: dict[str, TinyKind] = {
        "qwen2_5_vl": "qwen3-vl",
        "qwen3_5_text": "qwen3-5",
        "qwen3_5_moe_text": "qwen3-5-moe",
    }
    write_tiny_model(borrowed.get(model_type, "qwen3"), directory)
    torch.manual_seed(0)
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        text_config = AutoConfig.from_pretrained(directory).text_config
        text_config.tie_word_embeddings = False
        network: Any = AutoModelForCausalLM.from_config(text_config, dtype=torch.float32)
    elif model_type == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        rope |= {"original_max_position_embeddings": 256}
        network = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope, tie_word_embeddings=False))
    elif model_type == "mistral":
        network = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8, tie_word_embeddings=False))
    elif model_type == "qwen2":
        network = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
    else:
        network = Qwen2_5_VLForConditionalGeneration(_qwen2_5_vl_config(directory))
    # Qwen3.5's norms add one to their weight.
    network.get_decoder().norm.weight.data.fill_(4.0 if model_type.startswith("qwen3_5") else 5.0)
    network.save_pretrained(directory)


def _qwen2_5_vl_config(directory: Path) -> Qwen2_5_VLConfig:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "window_size": 64,
        "fullatt_block_indexes": [1],
    }
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")
    }
    ids |= {f"vision_{end}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")}
    return Qwen2_5_VLConfig(
        text_config=SMALL | {"rope_parameters": rope}, vision_config=vision, **ids, tie_word_embeddings=True
    )


def load(directory: Path, **models: Any) -> BaseModel:
    """The base model in `directory`, on DEVICE in float32 unless asked otherwise."""
    return load_base_model(
        "tiny", str(directory), ModelsConfig(**{"device": DEVICE, "dtype": "float32"} | models), 2**26
    )


def on_host(directory: Path, dtype: str = "float32", device: str = "cpu", expert_dtype: str = "model") -> BaseModel:
    """The base model in `directory` with layers that stay in the host's memory, to be divided over workers."""
    models = ModelsConfig(device=device, dtype=dtype, expert_dtype=expert_dtype)
    return load_base_model("tiny", str(directory), models, 2**26, layers_on_host=True)


def transformers_model(directory: Path, **options: Any) -> Any:
    """The model in `directory` in transformers' PyTorch code on any device, whatever kernels are installed.

    It computes experts one after the other.
    """
    auto: Any = (
        AutoModelForImageTextToText
        if AutoConfig.from_pretrained(directory).model_type in IMAGE_FAMILIES
        else AutoModelForCausalLM
    )
    network = auto.from_pretrained(directory, **{"dtype": torch.float32, "attn_implementation": "eager"} | options)
    follow_plans(network)  # without a plan they follow transformers
    if network.config.model_type in EXPERT_MODELS:
        network.set_experts_implementation("eager")
    return network.eval()


def renderer(base: BaseModel, **limits: Any) -> Renderer:
    """A renderer whose images all come with their bytes."""

    def no_blob(sha256: bytes) -> bytes:
        raise AssertionError(f"no image {sha256.hex()} in the store")

    return Renderer(base, ImagesConfig(**limits), no_blob)


def text(*tokens: int) -> TextChunk:
    """A text chunk."""
    return TextChunk(np.array(tokens, dtype=np.int32))


def png(seed: int, width: int = 96, height: int = 64) -> bytes:
    """An encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image(seed: int, width: int = 96, height: int = 64, expected_tokens: int | None = None) -> ImageChunk:
    """An image chunk of random pixels; 96x64 takes 6 tokens in the tiny models."""
    data = png(seed, width, height)
    return ImageChunk(hashlib.sha256(data).digest(), data, "png", expected_tokens)


def random_tokens(seed: int, length: int) -> TextChunk:
    """Ordinary text tokens."""
    return TextChunk(np.random.default_rng(seed).integers(0, 1500, length).astype(np.int32))


def image_chunks(base: BaseModel, seed: int, length: int, **size: int) -> list[Chunk]:
    """Text, an image between its markers, and text."""
    start, end = base.config.vision_start_token_id, base.config.vision_end_token_id
    return [
        random_tokens(seed, length // 2),
        text(start),
        image(seed, **size),
        text(end),
        random_tokens(seed + 1, length - length // 2),
    ]


def shifted(rendered: RenderedInput) -> NDArray[np.int64]:
    """Next-token targets [n]; the last is 0."""
    return np.append(rendered.token_ids[1:], 0).astype(np.int64)


def datum(model_id: str, rendered: RenderedInput, seed: int = 0, targets: NDArray[np.int64] | None = None) -> DatumWork:
    """A cross-entropy datum with weights of any sign, some of them 0."""
    targets = shifted(rendered) if targets is None else targets
    generator = np.random.default_rng(seed)
    weights = generator.normal(size=targets.shape) * (generator.random(targets.shape) < 0.7)
    return DatumWork(model_id, rendered, targets, LOSSES["cross_entropy"], {"weights": weights.astype(np.float32)})


_numbers = itertools.count()


def new_ref(label: str = "", inflight_of: str | None = None) -> WeightsRef:
    """An identity that no other weights have."""
    key = f"test/{next(_numbers)}"
    return WeightsRef("tiny", key, label or key, inflight_of)


def random_adapter(
    base: BaseModel, rank: int = 4, seed: int = 0, b_scale: float = 0.05, ref: WeightsRef | None = None, **shape: bool
) -> Adapter:
    """An adapter whose B is far from zero."""
    lora = LoraShape(rank, seed, **shape)
    adapter = new_adapter(lora, base.layout, base.device, base.dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    for pair in adapter.masters.values():
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * b_scale)
    adapter.refresh()
    adapter.ref = ref or new_ref()
    return adapter
