"""A worker's part of a copied state with sharded weights (`sharded_weights.py`), as pieces of a checkpoint's files.

All workers write these files together (`store/pieces.py`), as `checkpoint.write_state` writes them of the whole copy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Size, Tensor, float32

from tinsmith.store.files import ABOUT_FILE, OPTIMIZER_FILE
from tinsmith.store.pieces import FilePiece
from tinsmith.training.checkpoint import WEIGHTS_FILE, About
from tinsmith.training.parallel.flat_row import FlatRow
from tinsmith.training.tensor_files import TensorFile
from tinsmith.training.update_check import ENTRIES

BYTES = 4
"""Bytes of an element: all are float32."""


@dataclass(frozen=True, eq=False)
class CheckpointShard:
    """One worker's part of a state, in host memory, which no longer changes."""

    about: About | None
    """Description of the checkpoint, on the worker that also writes headers and step numbers; None on others."""
    rows: Mapping[str, FlatRow]
    rank: int
    """Rank of this worker among those that have a part of each row."""
    masters: Mapping[str, Tensor]
    """This worker's part of each row, by the row's name. float32."""
    moments: Mapping[str, Mapping[str, Tensor]] | None
    """Moments by entry, laid out like the masters; empty before the first step, None if only weights are saved."""
    step: Tensor | None
    """Number of steps of the model, the same on all workers."""

    def pieces(self) -> Iterator[FilePiece]:
        """Yield the bytes that this worker writes, without a copy. Any thread may write them."""
        shapes = dict(sorted((name, shape) for row in self.rows.values() for name, shape in row.shapes.items()))
        weights = TensorFile.of({name: (float32, shape) for name, shape in shapes.items()})
        yield from self._in_file(WEIGHTS_FILE, weights, {"": self.masters})
        if self.moments is not None:
            remembered = {f"{name}.{entry}": (float32, shape) for name, shape in shapes.items() for entry in ENTRIES}
            steps = {f"{name}.step": (float32, Size()) for name in shapes}
            optimizer = TensorFile.of(remembered | steps if self.moments else {})
            yield from self._in_file(
                OPTIMIZER_FILE, optimizer, {f".{entry}": parts for entry, parts in self.moments.items()}
            )
            if self.about is not None and self.step is not None:
                yield from (FilePiece(OPTIMIZER_FILE, optimizer.starts[name], _bytes_of(self.step)) for name in steps)
        if self.about is not None:
            yield FilePiece(ABOUT_FILE, 0, memoryview(self.about.text.encode()))

    def _in_file(self, file: str, layout: TensorFile, held: Mapping[str, Mapping[str, Tensor]]) -> Iterator[FilePiece]:
        """The pieces of one file: of what is `held` under the names of the parameters with some ending."""
        if self.about is not None:
            yield FilePiece(file, 0, memoryview(layout.header))
        for ending, parts in held.items():
            for name, row in self.rows.items():
                of_tensors = list(row.shapes)
                for number, there, inside in row.within(self.rank * row.part, row.part):
                    start = layout.starts[f"{of_tensors[number]}{ending}"] + BYTES * inside.start
                    yield FilePiece(file, start, _bytes_of(parts[name][there]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).numpy().data.cast("B")
