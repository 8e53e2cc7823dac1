"""How long a sequence may be at a vLLM server: what fits into its memory beside the weights, if that is less than the model's context.

vLLM does not start if its cache has no room for one sequence of the greatest length.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

import torch

from tinsmith.config import Config
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.vllm.options import share_of, value_of

log = logging.getLogger(__name__)

MAX_LORAS = 4
"""Adapters that a server computes side by side, unless it is told otherwise."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""

_FOR_PASSES = 0.15
"""Part of a server's memory that is left for what a pass computes, and for CUDA graphs. An estimate."""
_SHORTEST = 1024
"""Tokens. A server with less room than that is not worth starting."""
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
"""As vLLM reads them."""
_GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What of a base model takes memory at a server, in bytes."""

    weights: int
    cache_per_token: int
    """Keys and values of one token in all layers."""
    per_lora_rank: int
    """One rank of one adapter on everything that LoRA can train."""


def sizes_of(text_config: Any, parameters: int, per_lora_rank: int, dtype: torch.dtype) -> Sizes:
    """The sizes of a model with so many parameters, of which one rank of an adapter adds `per_lora_rank`."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    cache = 2 * text_config.num_hidden_layers * kv_heads * head_dim
    return Sizes(parameters * dtype.itemsize, cache * dtype.itemsize, per_lora_rank * dtype.itemsize)


def longest_sequence(base: BaseModel, config: Config, gpu: int | None) -> int:
    """Tokens of prompt and answer together that servers of a base model take on such a GPU, None for a CPU. Says so if these are fewer.

    Raises ConfigError if there is no room, or if --vllm-arg asks for more than the model's context.
    """
    options = config.vllm.vllm_args
    asked = value_of(options, "--max-model-len")
    if asked is not None:
        return _asked_for(asked, base.max_context)
    parameters, per_rank = sum(p.numel() for p in base.network.parameters()), base.layout.lora_parameters(LoraShape(rank=1, seed=0))
    sizes = sizes_of(base.text_config, parameters, per_rank, base.dtype)
    if gpu is None:
        memory = cpu_cache_gib(config) * _GIB
        fits, room = memory // sizes.cache_per_token, f"a cache of {memory / _GIB:g} GiB (--kv-cache-gib)"
    else:
        memory = int(share_of(options) * torch.cuda.get_device_properties(gpu).total_memory)
        fits = tokens_that_fit(sizes, memory, config)
        room = (
            f"{memory / _GIB:.1f} GiB of a GPU (--vllm-arg=--gpu-memory-utilization) with {sizes.weights / _GIB:.1f} GiB of weights and "
            "adapters (--max-lora-rank, --vllm-arg=--max-loras)"
        )
    if fits < min(_SHORTEST, base.max_context):
        raise ConfigError(f"a vLLM server of {base.name} has {room}: no sequence of {_SHORTEST} tokens fits in; give it more")
    if fits >= base.max_context:
        return base.max_context
    longest = fits // _SHORTEST * _SHORTEST
    log.info(
        "vLLM servers of %s take sequences of up to %d of %d tokens: more do not fit into %s", base.name, longest, base.max_context, room
    )
    return longest


def tokens_that_fit(sizes: Sizes, memory: int, config: Config) -> int:
    """Tokens whose keys and values find room in so many bytes of a GPU, beside weights, adapters and what a pass computes."""
    adapters = int(value_of(config.vllm.vllm_args, "--max-loras") or MAX_LORAS) * lora_rank(config.models.max_lora_rank)
    left = memory * (1 - _FOR_PASSES) - sizes.weights - adapters * sizes.per_lora_rank
    return int(left // sizes.cache_per_token)


def lora_rank(largest: int) -> int:
    """The rank of vLLM's slots for adapters of up to a rank. Raises ConfigError for what vLLM cannot serve."""
    for rank in RANKS:
        if largest <= rank:
            return rank
    raise ConfigError(f"max_lora_rank={largest} is more than vLLM can serve; it ends at {RANKS[-1]}")


def cpu_cache_gib(config: Config) -> int:
    """Memory of a server's cache without a GPU, as vLLM takes it."""
    return max(1, round(config.sampling.kv_cache_gib))


def _asked_for(text: str, context: int) -> int:
    match = re.fullmatch(r"(\d+)([kKmM]?)", text)
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < tokens <= context:
        raise ConfigError(f"--vllm-arg=--max-model-len={text}: give a number of tokens from 1 to the model's context of {context}")
    return tokens
