"""How much memory a base model and what is trained on it take, from its configuration alone: no weight is read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tinsmith.config import ModelsConfig
from tinsmith.models.base import pick_device, pick_dtype
from tinsmith.models.families import ATTENTION_TARGETS, MLP_TARGETS, family_of, read_config
from tinsmith.models.full import snapshot_bytes, training_bytes

SAVED_WIDTHS, SAVED_MLP_WIDTHS = 12, 4
"""What a layer keeps of a token for the backward pass, about: so many times the hidden width, and so many times the width of its MLP."""


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
    adapter_widths: int
    """Sum of in_features + out_features over all modules that LoRA trains, the LM head included."""

    @property
    def weight_bytes(self) -> int:
        """The frozen weights."""
        return self.parameters * self.dtype.itemsize

    def adapter_bytes(self, rank: int) -> int:
        """A frozen adapter: float32 masters, and a copy in the base's dtype unless that is float32 too."""
        return self.adapter_widths * rank * (4 if self.dtype == torch.float32 else 4 + self.dtype.itemsize)

    def training_bytes(self, rank: int) -> int:
        """An adapter that is trained: with accumulated gradients and Adam's two moments in float32."""
        return self.adapter_bytes(rank) + self.adapter_widths * rank * 3 * 4

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
        text = self.text_config
        width = SAVED_WIDTHS * text.hidden_size + SAVED_MLP_WIDTHS * text.intermediate_size
        return int(tokens * text.num_hidden_layers * width * self.dtype.itemsize + 2 * logits_chunk * text.vocab_size * 4)


def size_of(source: str, config: ModelsConfig) -> Sizes:
    """Sizes of the model in a local directory or of a Hub id. Raises ConfigError for what could not be served."""
    device = pick_device(config.device)
    model_config = read_config(source)
    family = family_of(source, model_config)
    auto: Any = AutoModelForImageTextToText if family.takes_images else AutoModelForCausalLM
    with torch.device("meta"):
        network: Any = auto.from_config(model_config)
    language_model: nn.Module = network.model.language_model if family.takes_images else network.base_model
    trained = {*language_model.parameters(), *network.get_output_embeddings().parameters()}  # a tied head is there already
    return Sizes(
        text_config=model_config.get_text_config(),
        device=device,
        dtype=pick_dtype(config.dtype, device),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        language_parameters=sum(parameter.numel() for parameter in trained),
        adapter_widths=_adapter_widths(language_model, network),
    )


def _adapter_widths(language_model: nn.Module, network: Any) -> int:
    trained = [
        module
        for name, module in language_model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ATTENTION_TARGETS + MLP_TARGETS
    ]
    return sum(module.in_features + module.out_features for module in [*trained, network.get_output_embeddings()])
