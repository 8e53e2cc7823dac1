"""The layers of a full-parameter model, sharded over workers: each keeps its slice of every layer, and of its gradient.

A layer is put together to be computed, as those of a base model are (`sharded_layers.py`). As soon as its backward is done, its gradients
are added up over all workers in float32, and each keeps the sum of its part alone: whole gradients of all layers would take more memory
than what is sharded. So each step of a backward ends with an exchange of all. A worker that has nothing to compute, or whose pass has
failed, gives zeros.

The gradients of a pass are kept apart until all workers have computed it: where it fails on one, what was added up is of no use to anybody.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.models.decoder import Layer
from tinsmith.models.flat_row import FlatRow
from tinsmith.training.sharded_layers import ShardedLayers


class GradientSums:
    """Sums over all workers of the gradients of flat rows, piece by piece where a row is larger than the buffer."""

    def __init__(self, group: ProcessGroup, numbers: int, device: torch.device) -> None:
        """The buffer takes a row of `numbers` numbers in float32, which is a multiple of the number of workers."""
        self.group = group
        self.buffer = torch.empty(numbers, dtype=torch.float32, device=device)
        self.summed: Callable[[], None] | None = None
        """Waits for the sum under way, which reads the buffer."""

    def begin(self, row: FlatRow, gradients: Sequence[Tensor | None], part: Tensor) -> None:
        """Begin to add up; `part` becomes this worker's part of the sum, when `wait` has returned. None stands for zeros.

        To be called by all workers. Takes no memory if the gradients are contiguous.
        """
        size = len(self.buffer) // self.group.count
        for start in range(0, row.part, size):
            count = min(size, row.part - start)
            self.wait()
            whole = self.buffer[: count * self.group.count]
            for rank, stretch in enumerate(whole.view(self.group.count, count)):
                row.fill(stretch, rank * row.part + start, gradients)
            self.summed = self.group.begin_to_sum_parts(part[start : start + count], whole)

    def wait(self) -> None:
        """Until all sums are there."""
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
        """`parts` are those of `rows`, flat and in the precision of the base."""
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
