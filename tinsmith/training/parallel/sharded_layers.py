"""A decoder with sharded layers (`--shard weights`): workers keep slices, and gather a layer when it is computed.

What is sharded is the weights of all layers: of a base model, which LoRA leaves as they are, or of a model with weights
of its own (`sharded_weights.py`). Embedding, LM head, last norm, vision tower and adapters are whole on each worker,
as are routers of experts, which nobody trains.

The tensors of a layer lie end to end in a row of bytes, of which worker R of N keeps the part number R. A pass needs
the layers in an order that all workers know before it begins:

    0, 1, ... , last        forward
    last - 1, ... , 1, 0    backward, if there is one: the last layer is still there

Every worker takes part in all of these steps: one that has no datum, or whose pass fails in the middle, goes through
the rest of them with `finish`. While a layer is computed the next one is under way, in a second buffer; nothing is
allocated in a pass, so a step cannot run out of memory.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Decoder, Layer
from tinsmith.models.machine import size_text
from tinsmith.models.streamed_decoder import StreamedDecoder, parameters_of, tensors_of, with_tensors
from tinsmith.training.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)

ALIGNED = 64
"""Tensors begin at multiples of so many bytes, as those that are allocated do."""


class ShardedLayers:
    """This worker's parts of all layers. All workers call `begin` and `finish` for every pass."""

    def __init__(self, group: ProcessGroup, templates: list[Layer], parts: list[Tensor], buffers: list[Tensor]) -> None:
        """Take two `buffers` that hold any of the layers and belong to whatever is computed now."""
        self.group = group
        self.templates = templates
        """Layers for shapes and names, without memory but for routers of experts."""
        self.parts = parts
        """[bytes of the layer / workers] of each layer."""
        self.buffers = buffers
        self.order: list[int] = []
        """The layers of the pass under way, step by step."""
        self.backward = False
        """Whether that pass has a backward, which begins with the last layer."""
        self.step = -1
        """The step of `order` whose layer is there; -1 before the first."""
        self.arrived: Callable[[], None] | None = None
        """Waits for the one behind it."""

    @property
    def count(self) -> int:
        return len(self.parts)

    def begin(self, backward: bool) -> None:
        count = len(self.parts)
        self.order = [*range(count), *(reversed(range(count - 1)) if backward else ())]
        self.backward = backward
        self.step = -1
        self._start()

    def layer(self, index: int) -> Layer:
        """Return a layer that can be computed until the next one is asked for. Steps before it are made now."""
        self._come_to(index)
        return self._view(index)

    def layer_to_train(self, index: int) -> tuple[Layer, tuple[Tensor, ...]]:
        """Return a layer, and its tensors whose gradients `give` wants: none of a frozen layer."""
        return self.layer(index), ()

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of what `layer_to_train` returned last."""

    def finish(self) -> None:
        """Make the steps that are left, and end the pass."""
        while self.step + 1 < len(self.order):
            self._advance()
        self._leave()
        self.order = []
        self.step = -1

    def _come_to(self, index: int) -> None:
        while self.step < 0 or self.order[self.step] != index:
            if self.step + 1 >= len(self.order):
                raise RuntimeError(
                    f"layer {index} is sharded over the workers, and no step of a pass of all of "
                    "them comes to it any more"
                )
            self._advance()

    def _leave(self) -> None:
        """End a step, together with all workers; nothing for frozen layers."""

    def _advance(self) -> None:
        self._leave()
        assert self.arrived is not None
        self.arrived()
        self.step += 1
        self._start()

    def make_room(self, nbytes: int) -> None:
        """Let the buffers hold so many bytes. Not within a pass."""
        for number, buffer in enumerate(self.buffers):
            if len(buffer) < nbytes:
                self.buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)

    def _start(self) -> None:
        """Let the next layer come, into the buffer of the one before this one."""
        self.arrived = None
        following = self.step + 1
        if following < len(self.order):
            part = self.parts[self.order[following]]
            self.arrived = self.group.begin_all_gather(self._buffer(following, part), part)

    def _buffer(self, step: int, part: Tensor) -> Tensor:
        return self.buffers[step % 2][: len(part) * self.group.count]

    def _view(self, index: int) -> Layer:
        row = self._buffer(self.step, self.parts[index])
        start = 0

        def view(template: Tensor) -> Tensor:
            nonlocal start
            found = row[start : start + template.nbytes].view(template.dtype).view(template.shape)
            start += _room(template)
            return found

        return with_tensors(self.templates[index], view)


def shard_layers(
    layers: Iterator[Layer], group: ProcessGroup, freed: Callable[[int], None], whole: tuple[str, ...] = ()
) -> ShardedLayers:
    """Shard frozen layers, which come one by one; `freed` lets go of what else holds the layer of that number.

    Parameters whose names begin with one of `whole` stay in the templates: models with all weights share them.
    """
    templates: list[Layer] = []
    parts: list[Tensor] = []
    while (layer := next(layers, None)) is not None:
        kept = {tensor.data_ptr() for name, tensor in parameters_of(layer).items() if name.startswith(whole)}
        templates.append(with_tensors(layer, partial(_template, kept)))
        parts.append(_own_part(tensors_of(layer), group))
        del layer
        freed(len(parts) - 1)
    largest = max(len(part) for part in parts) * group.count
    buffers = [torch.empty(largest, dtype=torch.uint8, device=parts[0].device) for _ in range(2)]
    return ShardedLayers(group, templates, parts, buffers)


def _template(kept: set[int], tensor: Tensor) -> Tensor:
    """A copy of a tensor that begins at one of these places, and of another one its shape alone."""
    if tensor.data_ptr() in kept:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="meta")


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


@torch.no_grad()
def _own_part(tensors: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return this worker's bytes of tensors that lie end to end: as many as every other one has."""
    unit = ALIGNED * group.count
    size = -(-sum(map(_room, tensors)) // unit) * unit
    row = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        row[start : start + tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start += _room(tensor)
    mine = size // group.count
    return row[group.place.rank * mine :][:mine].clone()


def require_divisible(base: BaseModel) -> None:
    """Raise ConfigError if the layers of the model cannot be sharded."""
    if base.decoder is None:
        raise ConfigError(
            f"{base.name} ({base.family.model_type}) cannot be served with --shard weights, which only models take "
            "whose layers Tinsmith's own decoder computes; use --shard none"
        )
    if base.deterministic:
        raise ConfigError(f"{base.name}: --shard weights and --deterministic do not work together; leave one out")


def shard(base: BaseModel, group: ProcessGroup) -> None:
    """Shard the layers of a base model over all workers: what this one does not keep is freed.

    They lie on its device, or come there from the host's memory one at a time.
    """
    require_divisible(base)
    decoder = base.decoder
    assert decoder is not None
    layers = _one_by_one(decoder)
    base.decoder = decoder = replace(decoder, layers=())
    sharded = shard_layers(layers, group, lambda index: _without_memory(base, index), base.layout.routers)
    base.decoder = ShardedDecoder(tuple(sharded.templates), decoder.last_norm, decoder.rope, sharded)
    if base.device.type == "cuda":
        torch.cuda.empty_cache()
    whole = sum(tensor.nbytes for template in sharded.templates for tensor in tensors_of(template))
    log.info(
        "%s: its %d layers are sharded over %d workers (--shard weights): this one keeps %s of %s, and %s of buffers",
        *(base.name, len(sharded.parts), group.count),
        *map(size_text, (sum(map(len, sharded.parts)), whole, sum(map(len, sharded.buffers)))),
    )


def _one_by_one(decoder: Decoder) -> Iterator[Layer]:
    """Yield the layers of a decoder on its device, of which it keeps none."""
    if isinstance(decoder, StreamedDecoder):
        return map(decoder.source.layer, range(decoder.source.count))
    layers = list(decoder.layers)
    return (layers.pop(0) for _ in range(len(layers)))


def _without_memory(base: BaseModel, index: int) -> None:
    """Free what transformers' modules hold of a layer."""
    base.language_model.get_submodule(f"layers.{index}").to("meta")


@dataclass(frozen=True, eq=False)
class ShardedDecoder(StreamedDecoder):
    """A decoder whose layers are sharded.

    It computes within passes of all workers (`ShardedLayers.begin` and `finish`).
    """

    @property
    def sharded(self) -> ShardedLayers:
        if not isinstance(self.source, ShardedLayers):
            raise TypeError(f"the layers come from {type(self.source).__name__}")
        return self.source
