"""How much memory a base model and what is trained on it take, from its configuration alone: no weight is read."""

from dataclasses import dataclass
from typing import Any

import torch

from tinsmith.config import ModelsConfig
from tinsmith.models.base import pick_device, pick_dtype
from tinsmith.models.families import context_length, family_of, read_config
from tinsmith.models.full import snapshot_bytes, training_bytes
from tinsmith.models.layout import Layout, empty_network, layout_of
from tinsmith.protocol.shapes import LoraShape

KEPT_OF_ATTENTION, KEPT_OF_MLP, KEPT_OF_RESIDUALS = 3, 4, 1
"""What a pass keeps of a token for its backward, about: so many times all that the linears around attention give, or those of a gated delta
net; and in each layer so many times the width of the MLP, and so many times the hidden width."""


@dataclass(frozen=True)
class Sizes:
    """What one base model takes, in numbers and bytes."""

    text_config: Any
    """The transformers configuration of the language model."""
    device: torch.device
    dtype: torch.dtype
    parameters: int
    language_parameters: int
    """Those that full-parameter training trains: of the language model, with its LM head."""
    max_context: int
    """The longest sequence, in tokens."""
    layout: Layout
    """What LoRA can train."""

    @property
    def weight_bytes(self) -> int:
        """The frozen weights."""
        return self.parameters * self.dtype.itemsize

    def adapter_bytes(self, rank: int) -> int:
        """A frozen adapter: float32 masters, and a copy in the base's dtype unless that is float32 too."""
        return self._lora_parameters(rank) * (4 if self.dtype == torch.float32 else 4 + self.dtype.itemsize)

    def training_bytes(self, rank: int) -> int:
        """An adapter that is trained: with accumulated gradients and Adam's two moments in float32."""
        return self.adapter_bytes(rank) + self._lora_parameters(rank) * 3 * 4

    def _lora_parameters(self, rank: int) -> int:
        return self.layout.lora_parameters(LoraShape(rank, seed=0))

    @property
    def full_bytes(self) -> int:
        """A model that is trained with all its parameters (rank 0)."""
        return training_bytes(self.language_parameters, self.dtype)

    @property
    def full_snapshot_bytes(self) -> int:
        """A snapshot of such a model."""
        return snapshot_bytes(self.language_parameters, self.dtype)

    def pass_bytes(self, tokens: int, logits_chunk: int) -> int:
        """What a forward_backward pass of that many tokens keeps, roughly, with `logits_chunk` rows of logits and their gradient."""
        logits: int = logits_chunk * self.text_config.vocab_size
        return tokens * self.token_bytes + 2 * logits * 4

    @property
    def token_bytes(self) -> int:
        """What a forward_backward pass keeps of each token, roughly."""
        text = self.text_config
        attention = sum(target.out_features for target in self.layout.targets.values() if target.group == "attn")
        each_layer = KEPT_OF_MLP * text.intermediate_size + KEPT_OF_RESIDUALS * text.hidden_size
        numbers: int = text.num_hidden_layers * each_layer + KEPT_OF_ATTENTION * attention
        return numbers * self.dtype.itemsize


def size_of(source: str, config: ModelsConfig) -> Sizes:
    """Sizes of the model in a local directory or of a Hub id. Raises ConfigError for what could not be served."""
    device = pick_device(config.device)
    model_config = read_config(source)
    family = family_of(source, model_config)
    network = empty_network(family, model_config)
    trained = {*family.language_model(network).parameters(), *network.get_output_embeddings().parameters()}  # a tied head is there already
    text_config = model_config.get_text_config()
    return Sizes(
        text_config=text_config,
        device=device,
        dtype=pick_dtype(config.dtype, device),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        language_parameters=sum(parameter.numel() for parameter in trained),
        max_context=context_length(source, text_config, config.max_context),
        layout=layout_of(source, family, network),
    )
