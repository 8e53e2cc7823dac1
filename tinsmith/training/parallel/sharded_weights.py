"""All weights of a model, sharded over the workers (`--shard weights`, rank 0).

Each layer, and each tensor around them (embedding, last norm, LM head), is a flat row of numbers, of which every worker
keeps a part: of the float32 masters, of what AdamW remembers, of the gradients, and of what passes read in the
precision of the base. The tensors around the layers are whole on each worker as well, in the precision of the base: a
pass needs them at both of its ends.

A layer is gathered to be computed (`sharded_layers.py`). As soon as its backward is done, its gradients are summed over
all workers in float32, and each keeps its part of the sum: whole gradients of all layers would take more memory than
what is sharded. A worker that has nothing to compute, or whose pass has failed, gives zeros. The gradients of a pass
are kept apart until all workers have computed it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.memory.budget import FullBytes, sharded_full_bytes
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Decoder, Layer
from tinsmith.models.full import FullWeights
from tinsmith.models.streamed_decoder import parameters_of
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.training.parallel.flat_row import FlatRow
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sharded_layers import ShardedDecoder, ShardedLayers


class GradientSums:
    """Sums over all workers of the gradients of flat rows, piece by piece where a row is larger than the buffer."""

    def __init__(self, group: ProcessGroup, numbers: int, device: torch.device) -> None:
        """Allocate a buffer of `numbers` numbers in float32, a multiple of the number of workers."""
        self.group = group
        self.buffer = torch.empty(numbers, dtype=torch.float32, device=device)
        self.summed: Callable[[], None] | None = None
        """Waits for the sum under way, which reads the buffer."""

    def begin(self, row: FlatRow, gradients: Sequence[Tensor | None], part: Tensor) -> None:
        """Begin to sum; `part` becomes this worker's part of the sum when `wait` has returned. None stands for zeros.

        To be called by all workers. Takes no memory if the gradients are contiguous.
        """
        size = len(self.buffer) // self.group.count
        for start in range(0, row.part, size):
            count = min(size, row.part - start)
            self.wait()
            whole = self.buffer[: count * self.group.count]
            for rank, stretch in enumerate(whole.view(self.group.count, count)):
                row.fill(stretch, rank * row.part + start, gradients)
            self.summed = self.group.begin_reduce_scatter(part[start : start + count], whole)

    def wait(self) -> None:
        """Wait until all sums are there."""
        if self.summed is not None:
            summed, self.summed = self.summed, None
            summed()


class TrainedLayers(ShardedLayers):
    """This worker's parts of all layers of one model. In a backward every step of every worker ends with a sum."""

    def __init__(
        self,
        group: ProcessGroup,
        templates: list[Layer],
        rows: list[FlatRow],
        parts: list[Tensor],
        buffers: list[Tensor],
        sums: GradientSums,
    ) -> None:
        """Take the `parts` of `rows`, flat and in the precision of the base."""
        super().__init__(group, templates, [part.view(torch.uint8) for part in parts], buffers)
        self.rows = rows
        self.dtype = parts[0].dtype
        self.sums = sums
        self.gradients: list[Tensor] | None = None
        """This worker's part of the gradient of each layer, which a backward fills; set before it begins."""
        self.leaves: dict[str, Tensor] = {}
        """The parameters of the layer that is trained now."""
        self.given = False
        """Whether the gradients of the layer that is there have been given."""

    def layer_to_train(self, index: int) -> tuple[Layer, tuple[Tensor, ...]]:
        self._come_to(index)
        self.leaves = {name: tensor.requires_grad_() for name, tensor in self._parameters(index).items()}
        return self._with(index, self.leaves), tuple(self.leaves.values())

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        self.leaves = {}
        self._sum(gradients)

    def finish(self) -> None:
        super().finish()
        self.sums.wait()

    def _leave(self) -> None:
        """A step of the backward that has given nothing gives zeros."""
        if self.backward and self.step >= len(self.parts) - 1 and not self.given:
            self._sum([None] * len(self.rows[self.order[self.step]].shapes))
        self.given = False

    def _sum(self, gradients: Sequence[Tensor | None]) -> None:
        index = self.order[self.step]
        assert self.gradients is not None
        self.sums.begin(self.rows[index], gradients, self.gradients[index])
        self.given = True

    def _view(self, index: int) -> Layer:
        return self._with(index, self._parameters(index))

    def _parameters(self, index: int) -> dict[str, Tensor]:
        whole = self._buffer(self.step, self.parts[index]).view(self.dtype)
        return self.rows[index].views(whole)

    def _with(self, index: int, parameters: Mapping[str, Tensor]) -> Layer:
        return self.templates[index].with_weights(parameters)


class ShardedWeights(FullWeights):
    """This worker's part of them.

    `masters` and all that is laid out like these hold a flat part of each row, by the row's name.
    """

    def __init__(self, base: BaseModel, shape: LoraShape, group: ProcessGroup) -> None:
        """Allocate memory, which `take` gives numbers. Raises UserError for what cannot be sharded."""
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
        self.wholes = {
            name: torch.zeros(row.part * group.count, dtype=base.dtype, device=device) for name, row in around
        }
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
            self.group.begin_all_gather(whole, self.parts[name])()

    def snapshot(self, ref: WeightsRef) -> NoReturn:
        """Raise `UserError`: no worker holds all weights, so none can be sampled."""
        raise UserError(
            "all weights are sharded over the workers (--shard weights), and none of them has what is sampled: "
            "save them with save_weights_for_sampler, and sample the checkpoint with a server that has --train none, "
            "or serve with --sampler vllm"
        )

    def leaves(self) -> list[Tensor]:
        """Tensors of a pass that get gradients, except layers, whose gradients are summed during the backward."""
        return [*self.working.values(), self.anchor]

    def compared(self) -> list[Tensor]:
        return list(self.working.values())

    @property
    def nbytes(self) -> int:
        working = [] if self.parts is self.masters else self.parts.values()
        own = [*self.masters.values(), *working, *self.wholes.values(), self.sums.buffer]
        return sum(tensor.nbytes for tensor in own)

    @property
    def parameter_count(self) -> int:
        return sum(row.numbers for row in self.rows.values())


def rows_of(base: BaseModel, shape: LoraShape, workers: int) -> dict[str, FlatRow]:
    """Return the trained rows: each layer as `layers.I`, then each tensor around them.

    Raises UserError for what cannot be sharded.
    """
    off = [name for name, on in (("train_attn", shape.train_attn), ("train_mlp", shape.train_mlp)) if not on]
    if off:
        raise UserError(
            f"{off[0]}=False and lora_config.rank=0: a server with --shard weights trains whole layers; "
            f"leave {off[0]} on, train LoRA (a rank of 1 or more), or serve with --shard none"
        )
    decoder = base.decoder
    assert isinstance(decoder, ShardedDecoder)
    shapes = {name: tensor.shape for name, tensor in base.full_targets(shape).items()}
    rows: dict[str, FlatRow] = {}
    for index, template in enumerate(decoder.sharded.templates):
        own = {name: shapes.pop(name) for name in list(shapes) if name.startswith(f"layers.{index}.")}
        known = {name for name in parameters_of(template) if not name.startswith(base.layout.routers)}
        if own.keys() != known:
            strange = min(own.keys() ^ known)
            raise UserError(
                f"{base.name} cannot be trained as a whole with --shard weights, because of its {strange}; "
                "use --shard none"
            )
        rows[f"layers.{index}"] = FlatRow(own, workers)
    return rows | {name: FlatRow({name: size}, workers) for name, size in shapes.items()}


def bytes_of(base: BaseModel, shape: LoraShape, workers: int) -> FullBytes:
    """Bytes of a model of this shape on each worker."""
    rows = [row.numbers for row in rows_of(base, shape, workers).values()]
    count = len(base.layout.layers)
    return sharded_full_bytes(rows[:count], sum(rows[count:]), base.dtype, workers)


def take_from_base(weights: ShardedWeights, base: BaseModel) -> None:
    """Give weights the numbers of the base, whose layers are gathered one by one: to be called by all workers."""
    assert isinstance(base.decoder, ShardedDecoder)
    frozen = base.decoder.sharded
    frozen.begin(backward=False)
    for index in range(len(frozen.parts)):
        weights.take(f"layers.{index}", parameters_of(frozen.layer(index)))
    frozen.finish()
    around = base.full_targets(weights.shape)
    for name in weights.wholes:
        weights.take(name, around)


def gathered(weights: ShardedWeights, parts: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None) -> None:
    """Gather what is laid out like the masters, such as a moment, into `tensors` by the names of the parameters.

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
            group.begin_all_gather(whole, parts[name][start : start + count])()
            if tensors is not None:
                for rank, stretch in enumerate(whole.view(group.count, count)):
                    row.read(stretch, rank * row.part + start, wanted)
