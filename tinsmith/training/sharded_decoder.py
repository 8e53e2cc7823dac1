"""A decoder with sharded layers (`--shard weights`): each is gathered while it is computed, forward and backward.

What is sharded is the weights of all layers: of a base model, which LoRA leaves as they are, or of a model with weights of its own
(`sharded_weights.py`). Embedding, LM head, last norm, vision tower and adapters are whole on each worker.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Decoder, Layer
from tinsmith.models.machine import size_text
from tinsmith.models.streamed_decoder import StreamedDecoder
from tinsmith.training.sharded_layers import ShardedLayers, shard_layers

log = logging.getLogger(__name__)


def require_divisible(base: BaseModel) -> None:
    """Raise ConfigError if the layers of the model cannot be sharded."""
    if base.decoder is None:
        raise ConfigError(
            f"{base.name} ({base.family.model_type}) cannot be served with --shard weights, which only models take whose layers Tinsmith's "
            "own decoder computes; use --shard none"
        )
    if base.deterministic:
        raise ConfigError(f"{base.name}: --shard weights and --deterministic do not work together; leave one out")


def shard(base: BaseModel, group: ProcessGroup) -> None:
    """Divide the layers of a base model over all workers: what this one does not keep of them is freed.

    They lie on its device, or come there from the host's memory one at a time.
    """
    require_divisible(base)
    decoder = base.decoder
    assert decoder is not None
    layers = _one_by_one(decoder)
    base.decoder = decoder = replace(decoder, layers=())
    sharded = shard_layers(layers, group, lambda index: _without_memory(base, index))
    base.decoder = ShardedDecoder(tuple(sharded.templates), decoder.last_norm, decoder.rope, sharded)
    if base.device.type == "cuda":
        torch.cuda.empty_cache()
    log.info(
        "%s: its %d layers are sharded over %d workers (--shard weights): this one keeps %s of %s, and %s of buffers",
        *(base.name, len(sharded.parts), group.count),
        *map(size_text, (sharded.nbytes, sharded.whole_bytes, sharded.buffer_bytes)),
    )


def _one_by_one(decoder: Decoder) -> Iterator[Layer]:
    """The layers of a decoder on its device, of which it keeps none."""
    if isinstance(decoder, StreamedDecoder):
        return map(decoder.source.layer, range(decoder.source.count))
    layers = list(decoder.layers)
    return (layers.pop(0) for _ in range(len(layers)))


def _without_memory(base: BaseModel, index: int) -> None:
    """Let go of what transformers' modules hold of a layer."""
    base.language_model.get_submodule(f"layers.{index}").to("meta")


@dataclass(frozen=True, eq=False)
class ShardedDecoder(StreamedDecoder):
    """A decoder whose layers are sharded. It computes within passes of all workers (`ShardedLayers.begin` and `finish`)."""

    @property
    def sharded(self) -> ShardedLayers:
        """The source of its layers."""
        if not isinstance(self.source, ShardedLayers):
            raise TypeError(f"the layers come from {type(self.source).__name__}")
        return self.source
