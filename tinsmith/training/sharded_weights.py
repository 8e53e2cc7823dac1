"""All weights of a model, sharded over the workers (`--shard weights`, rank 0).

Each layer, and each tensor before the first and behind the last of them (embedding, last norm, LM head), is a flat row of numbers, of
which every worker keeps a part: of the float32 masters, of what AdamW remembers, of the gradients, and of what passes read in the precision
of the base. Layers are put together while they are computed (`trained_layers.py`). The tensors around them are whole on each worker as
well, in the precision of the base: a pass needs them at both of its ends.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Decoder
from tinsmith.models.flat_row import FlatRow
from tinsmith.models.full import FullBytes, FullWeights, sharded_full_bytes
from tinsmith.models.streamed_decoder import parameters_of
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.training.sharded_decoder import ShardedDecoder
from tinsmith.training.trained_layers import GradientSums, TrainedLayers


class ShardedWeights(FullWeights):
    """This worker's part of them. `masters` and all that is laid out like these hold a flat part of each row, by the row's name."""

    def __init__(self, base: BaseModel, shape: LoraShape, group: ProcessGroup) -> None:
        """Memory for them, which `take` gives numbers. The base is sharded too. Raises UserError for what cannot be sharded."""
        if not isinstance(base.decoder, ShardedDecoder):
            raise TypeError(f"the layers of {base.name} are not sharded")
        self.shape, self.dtype, self.group = shape, base.dtype, group
        self.ref: WeightsRef | None = None
        self.rows = rows_of(base, shape, group.count)
        count = len(base.layout.layers)
        in_layers, around = list(self.rows.items())[:count], list(self.rows.items())[count:]
        device = base.device
        self.masters = {name: torch.zeros(row.part, device=device) for name, row in self.rows.items()}
        wide = base.dtype == torch.float32
        self.parts = self.masters if wide else {name: master.to(base.dtype) for name, master in self.masters.items()}
        """Working copies that passes read; the masters themselves if those have that precision."""
        self.wholes = {name: torch.zeros(row.part * group.count, dtype=base.dtype, device=device) for name, row in around}
        """[part · workers] of the tensors around the layers, of which `working` are views."""
        self.working = {name: row.views(self.wholes[name])[name].requires_grad_() for name, row in around}
        self.anchor = torch.zeros((), dtype=base.dtype, device=device, requires_grad=True)
        rows = [row for _, row in in_layers]
        self.sums = GradientSums(group, max(row.part for row in rows) * group.count, device)
        frozen = base.decoder.sharded
        frozen.make_room(max(row.part for row in rows) * group.count * base.dtype.itemsize)
        parts = [self.parts[name] for name, _ in in_layers]
        self.layers = TrainedLayers(group, frozen.templates, rows, parts, frozen.buffers, self.sums)
        own = base.decoder.last_norm.with_weights(self.working)
        self.decoder = ShardedDecoder(base.decoder.layers, own, base.decoder.rope, self.layers, self.anchor)

    def decoder_of(self, own: Decoder) -> Decoder:
        return self.decoder

    @torch.no_grad()
    def take(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Give the row of this name its numbers, from tensors of any precision, wherever they lie."""
        row = self.rows[name]
        in_order = [tensors[each] for each in row.shapes]
        row.fill(self.masters[name], self.group.place.rank * row.part, in_order)
        if self.parts is not self.masters:
            self.parts[name].copy_(self.masters[name])
        if name in self.wholes:
            row.fill(self.wholes[name], 0, in_order)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make what passes read equal to the masters again. To be called by all workers."""
        if self.parts is not self.masters:
            torch._foreach_copy_(list(self.parts.values()), self.tensors())
        for name, whole in self.wholes.items():
            self.group.begin_to_join(whole, self.parts[name])()

    def snapshot(self, ref: WeightsRef) -> NoReturn:
        raise UserError(
            "all weights are sharded over the workers (--shard weights), and none of them has what is sampled: save them with "
            "save_weights_for_sampler, and sample the checkpoint with a server that has --train none, or serve with --sampler vllm"
        )

    def leaves(self) -> list[Tensor]:
        """Tensors of a pass that get gradients, except layers, whose gradients are summed during the backward."""
        return [*self.working.values(), self.anchor]

    def compared(self) -> list[Tensor]:
        return list(self.working.values())

    @property
    def nbytes(self) -> int:
        own = [*self.masters.values(), *self.wholes.values(), self.sums.buffer]
        return sum(tensor.nbytes for tensor in own) + (0 if self.parts is self.masters else sum(map(_nbytes, self.parts.values())))

    @property
    def parameter_count(self) -> int:
        """Number of parameters of all workers together."""
        return sum(row.numbers for row in self.rows.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def rows_of(base: BaseModel, shape: LoraShape, workers: int) -> dict[str, FlatRow]:
    """Return the trained rows: each layer as `layers.I`, then each tensor around them. Raises UserError for what cannot be sharded."""
    off = [name for name, on in (("train_attn", shape.train_attn), ("train_mlp", shape.train_mlp)) if not on]
    if off:
        raise UserError(
            f"{off[0]}=False and lora_config.rank=0: a server with --shard weights trains whole layers; leave {off[0]} on, train LoRA "
            "(a rank of 1 or more), or serve with --shard none"
        )
    decoder = base.decoder
    assert isinstance(decoder, ShardedDecoder)
    shapes = {name: tensor.shape for name, tensor in base.full_targets(shape).items()}
    rows: dict[str, FlatRow] = {}
    for index, template in enumerate(decoder.sharded.templates):
        own = {name: shapes.pop(name) for name in list(shapes) if name.startswith(f"layers.{index}.")}
        if own.keys() != parameters_of(template).keys():
            strange = min(own.keys() ^ parameters_of(template).keys())
            raise UserError(f"{base.name} cannot be trained as a whole with --shard weights, because of its {strange}; use --shard none")
        rows[f"layers.{index}"] = FlatRow(own, workers)
    return rows | {name: FlatRow({name: size}, workers) for name, size in shapes.items()}


def bytes_of(base: BaseModel, shape: LoraShape, workers: int) -> FullBytes:
    """Return the bytes of a model of this shape on each worker."""
    rows = [row.numbers for row in rows_of(base, shape, workers).values()]
    count = len(base.layout.layers)
    return sharded_full_bytes(rows[:count], sum(rows[count:]), base.dtype, workers)


def take_from_base(weights: ShardedWeights, base: BaseModel) -> None:
    """Give weights the numbers of the base, whose layers are put together one by one: to be called by all workers."""
    assert isinstance(base.decoder, ShardedDecoder)
    frozen = base.decoder.sharded
    frozen.begin(backward=False)
    for index in range(len(frozen.parts)):
        weights.take(f"layers.{index}", parameters_of(frozen.layer(index)))
    frozen.finish()
    around = base.full_targets(weights.shape)
    for name in weights.wholes:
        weights.take(name, around)


def take_from(weights: ShardedWeights, tensors: Mapping[str, Tensor]) -> None:
    """Give weights the numbers of a checkpoint."""
    for name in weights.rows:
        weights.take(name, tensors)


def gathered(weights: ShardedWeights, parts: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None) -> None:
    """Put together what is laid out like the masters, such as a moment, into `tensors` by the names of the parameters.

    To be called by all workers, with parts of one precision; those that want nothing give None. Takes no memory.
    """
    group = weights.group
    buffer = weights.sums.buffer.view(next(iter(parts.values())).dtype)
    size = len(buffer) // group.count
    for name, row in weights.rows.items():
        wanted: Sequence[Tensor] = [] if tensors is None else [tensors[each] for each in row.shapes]
        for start in range(0, row.part, size):
            count = min(size, row.part - start)
            whole = buffer[: count * group.count]
            group.begin_to_join(whole, parts[name][start : start + count])()
            if tensors is not None:
                for rank, stretch in enumerate(whole.view(group.count, count)):
                    row.read(stretch, rank * row.part + start, wanted)
