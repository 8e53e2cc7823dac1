"""Computes the memory of a base model and of training it from its configuration alone."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from tinsmith.config import Config, ModelsConfig
from tinsmith.errors import ConfigError
from tinsmith.memory.budget import FullBytes, ModelBytes, full_bytes, lora_bytes, sharded_full_bytes, snapshot_bytes
from tinsmith.memory.pass_memory import PassMemory, pass_memory_of, sliced_pass_memory_of
from tinsmith.models.base import BaseModel, pick_device, pick_dtype
from tinsmith.models.batched_lora import most_columns
from tinsmith.models.families import context_length, empty_network, family_of, read_config
from tinsmith.models.full import FullState
from tinsmith.models.layout import Layout, layout_of
from tinsmith.models.network import layer_modules
from tinsmith.models.quantized import FORMATS, Format, bytes_of, format_of, scratch_numbers
from tinsmith.protocol.shapes import LoraShape


@dataclass(frozen=True)
class Sizes:
    """Sizes of one base model, in numbers and bytes."""

    text_config: Any
    device: torch.device
    dtype: torch.dtype
    parameters: int
    language_parameters: int
    """Those that full-parameter training trains, with the LM head."""
    max_context: int
    """The longest sequence, in tokens."""
    layout: Layout
    layer_parameters: tuple[int, ...]
    """Those of each layer of the language model, without routers of experts, which are not trained."""
    expert_format: Format | None = None
    """How the matrices of experts are held; None for those of `dtype`."""
    parts: int = 1
    """Number of workers over which layers are sharded (--shard weights); 1 if each holds all of them."""

    @property
    def weight_bytes(self) -> int:
        """The frozen weights of one worker, with memory to unpack quantized experts of a layer.

        Where layers are sharded it also has room for two that are put together.
        """
        around = (self.parameters - sum(self.layer_parameters)) * self.dtype.itemsize + self.scratch_bytes
        layers = self._layer_bytes
        return around + (sum(layers) if self.parts == 1 else -(-sum(layers) // self.parts) + 2 * max(layers))

    @property
    def with_fp8(self) -> "Sizes | None":
        """The sizes with --expert-dtype fp8; None for a model without experts, or whose experts are held so already."""
        if not self.layout.experts or self.expert_format is not None:
            return None
        return replace(self, expert_format=FORMATS["fp8"])

    @property
    def scratch_bytes(self) -> int:
        """Memory to unpack quantized experts of a layer."""
        if self.expert_format is None:
            return 0
        return scratch_numbers(self.layout.experts.values(), self.text_config.hidden_size) * self.dtype.itemsize

    @property
    def _layer_bytes(self) -> list[int]:
        """The weights of each layer, as they are held."""
        found = [numbers * self.dtype.itemsize for numbers in self.layer_parameters]
        if self.expert_format is not None:
            hidden: int = self.text_config.hidden_size
            for index, kind in self.layout.experts.items():
                found[index] -= kind.parameters(hidden) * self.dtype.itemsize
                found[index] += bytes_of(self.expert_format, kind, hidden, self.dtype)
        return found

    @property
    def column_bytes(self) -> int:
        """What decoding may keep of experts' adapters (`models/batched_lora.py`). Those of linears are small."""
        return most_columns(self.layout, self.dtype) * self.layout.expert_widths * self.dtype.itemsize

    def model(self, rank: int, state: FullState = "float32") -> ModelBytes:
        """Return the bytes of one trained model of this LoRA rank; rank 0 trains all parameters and keeps `state`."""
        if rank == 0:
            full = self.full(state)
            return ModelBytes(full.device, snapshot_bytes(self.language_parameters, self.dtype), full.host)
        return lora_bytes(self.layout, LoraShape(rank, seed=0), self.dtype)

    def full(self, state: FullState) -> FullBytes:
        """Return the bytes of training all parameters; with sharded layers those of one worker, in float32."""
        if self.parts == 1:
            return full_bytes(self.language_parameters, self.dtype, state)
        around = self.language_parameters - sum(self.layer_parameters)
        return sharded_full_bytes(self.layer_parameters, around, self.dtype, self.parts)

    @property
    def passes(self) -> PassMemory:
        """Memory of passes."""
        return pass_memory_of(self.layout, self.text_config, self.dtype, sharded=self.parts > 1)

    def passes_of_slices(self, workers: int) -> PassMemory:
        """Return each worker's memory for a sequence that all compute together."""
        return sliced_pass_memory_of(self.layout, self.text_config, self.dtype, workers)


def require_sampler(name: str, layout: Layout, config: Config) -> None:
    """Raise ConfigError if the configured sampler cannot sample a base model. Its weights need not be there."""
    if config.sampling.sampler == "vllm" and layout.experts:
        raise ConfigError(
            f"--sampler vllm: {name} ({layout.family.model_type}) is a mixture of experts, and how vLLM applies "
            "adapters to experts was not compared with the trainer; serve it with --sampler local, or train alone "
            "with --sampler none"
        )


def beside_weights(free: int, bases: Collection[Sizes], config: Config) -> int:
    """Return the bytes that all base models leave of `free`, and the local sampler; negative if they do not fit."""
    return free - sum(sizes.weight_bytes for sizes in bases) - column_bytes(bases, config)


def column_bytes(bases: Collection[Sizes], config: Config) -> int:
    """Return what the local sampler may keep of experts' adapters."""
    return sum(sizes.column_bytes for sizes in bases) if config.sampling.sampler == "local" else 0


def loaded_sizes(base: BaseModel, parts: int) -> Sizes:
    """Sizes of a loaded base model, whose layers are sharded over `parts` workers."""
    trained = {name: tensor.numel() for name, tensor in base.trainable(LoraShape(0, seed=0)).items()}
    parameters = sum(parameter.numel() for parameter in base.network.parameters())
    for index, kind in base.layout.experts.items() if base.expert_format else ():
        trained[f"layers.{index}.mlp.experts"] = kind.parameters(base.text_config.hidden_size)
        parameters += kind.parameters(base.text_config.hidden_size)
    layers = [f"layers.{index}." for index in range(len(base.layout.layers))]
    return Sizes(
        text_config=base.text_config,
        device=base.device,
        dtype=base.dtype,
        parameters=parameters,
        language_parameters=sum(trained.values()),
        max_context=base.max_context,
        layout=base.layout,
        layer_parameters=tuple(
            sum(count for name, count in trained.items() if name.startswith(layer)) for layer in layers
        ),
        expert_format=base.expert_format,
        parts=parts,
    )


def size_of(source: str, config: ModelsConfig) -> Sizes:
    """Sizes of the model in a local directory or of a Hub id. Raises ConfigError for what could not be served."""
    device = pick_device(config.device)
    model_config = read_config(source)
    family = family_of(source, model_config)
    network = empty_network(source, family, model_config)
    layout, language_model = layout_of(source, family, network), family.language_model(network)
    frozen = {p for name, p in language_model.named_parameters() if name.startswith(layout.routers)}
    # A tied head is there already
    trained = {*language_model.parameters(), *network.get_output_embeddings().parameters()} - frozen
    text_config = model_config.get_text_config()
    _, layers = layer_modules(language_model)
    return Sizes(
        text_config=text_config,
        device=device,
        dtype=pick_dtype(config.dtype, device),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        language_parameters=sum(parameter.numel() for parameter in trained),
        max_context=context_length(source, text_config, config.max_context),
        layout=layout,
        layer_parameters=tuple(sum(p.numel() for p in {*layer.parameters()} & trained) for layer in layers),
        expert_format=format_of(source, layout, config.expert_dtype),
    )
