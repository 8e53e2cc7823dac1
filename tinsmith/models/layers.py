"""The kinds of layers of a language model, as data that training, sampling, sizing, export and the self-check read.

A kind says what a layer asks of a pass (`models/attention.py`) and what has to be kept of a sequence to continue it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tinsmith.errors import ConfigError

DELTA_NET_MODELS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose `linear_attention` layers are the gated delta nets that `models/network.py` computes."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention, which keeps keys and values of every token."""

    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al., arXiv 2412.06464) behind a short convolution, with a state of constant size."""

    key_heads: int
    """Heads of queries and of keys."""
    value_heads: int
    """A multiple of `key_heads`."""
    key_dim: int
    """Width of a head of queries and of keys."""
    value_dim: int
    taps: int
    """Last tokens that the convolution sees, the current one included."""

    @property
    def sections(self) -> dict[str, tuple[int, int]]:
        """The channels [start, end) of the convolution, and outputs of `in_proj_qkv`, of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, self.channels)}

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one sequence: the last inputs of the convolution in `dtype`, and the recurrent state in float32."""
        return (self.taps - 1) * self.channels * dtype.itemsize + self.value_heads * self.key_dim * self.value_dim * 4


LayerKind = Attention | DeltaNet


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP: a router sends each token to the few experts that suit it best."""

    count: int
    per_token: int
    """Experts that compute a token."""
    width: int
    """Numbers between gate and up, and down, of each expert."""
    normalized: bool
    """Whether the router's probabilities of the chosen experts are divided by their sum."""
    shared_width: int
    """The same width of the expert that computes every token, with a gate of its own; 0 if there is none."""

    def parameters(self, hidden: int) -> int:
        """Count the numbers of all experts' matrices, without the shared one's."""
        return 3 * self.count * self.width * hidden


def layers_of(source: str, model_type: str, text_config: Any) -> tuple[LayerKind, ...]:
    """The kind of each layer of a language model with this transformers configuration.

    Raises ConfigError, naming `source`, for layers of another kind, or of different sizes.
    """
    try:
        return _read_kinds(source, model_type, text_config)
    except (AttributeError, RuntimeError) as error:  # the latter where sizes differ between layers
        reason = str(error).split(". ")[0]
        raise ConfigError(f"{source}: the layers of {model_type!r} are not supported: {reason}") from error


def _read_kinds(source: str, model_type: str, text_config: Any) -> tuple[LayerKind, ...]:
    count = text_config.num_hidden_layers
    types = getattr(text_config, "layer_types", None) or ["full_attention"] * count
    known = {"full_attention": _attention, "sliding_attention": _attention}
    if model_type in DELTA_NET_MODELS:
        known["linear_attention"] = _delta_net
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ConfigError(
            f"{source}: layers of type {', '.join(unknown)} are not supported for {model_type!r}; "
            f"supported are {', '.join(known)}"
        )
    return tuple(known[kind](text_config) for kind in types)


def _attention(text_config: Any) -> LayerKind:
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return Attention(getattr(text_config, "num_key_value_heads", None) or heads, head_dim)


def _delta_net(text_config: Any) -> LayerKind:
    return DeltaNet(
        key_heads=text_config.linear_num_key_heads,
        value_heads=text_config.linear_num_value_heads,
        key_dim=text_config.linear_key_head_dim,
        value_dim=text_config.linear_value_head_dim,
        taps=text_config.linear_conv_kernel_dim,
    )
