"""One of several processes that train the same models: `python -m tests.distributed.dividing RANK COUNT DIRECTORY`.

They divide the layers of base models, or are replicas, of which each has all of them. It goes through all cases, in the same order as the
others, and leaves in DIRECTORY/RANK.pt what each came to; four processes go through a few of them. The tiny models lie below
DIRECTORY/bases, and a checkpoint that a process alone has written is DIRECTORY/alone.
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.bases import datum, load, picture_chunks, random_tokens, renderer
from tests.distributed.devices import begin, here
from tinsmith.config import TrainingConfig
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import DeviceLostError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Layer
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.divided_backend import DividedBackend
from tinsmith.training.divided_decoder import DividedDecoder, divide
from tinsmith.wire.chunks import Chunk

T = TypeVar("T")

TRAINING = TrainingConfig(logits_chunk=64)
SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1, grad_clip_norm=50.0)
"""eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
SHAPES = {"four": LoraShape(4, 0), "two": LoraShape(2, 1, train_unembed=False)}
"""Two models of other ranks, which share the rows of a pass."""
OWNERS = [(0, 1, 2, 0, 1, 2), (1, 1, 1, 1, 1, 1), (0, 0, 2, 2, 2, 0), (3, 2, 0, 3, 3, 3), (2, 1, 1, 0, 1, 3)]
"""Which worker computes each datum of a step, counted round the workers there are: at the second step all others have none."""
STEPS = len(OWNERS)
PICTURES = [{4: (320, 64), 5: (384, 64)}] * 4 + [{1: (64, 64), 2: (96, 64), 3: (448, 448), 4: (64, 96)}]
"""Which datums of a step have pictures, and of which width and height, if the base takes them.

At the last step one worker has several small ones and another one of 196 tokens; of three or four workers others have text alone.
"""
FAULTS = [(kind, where) for kind in ("memory", "other") for where in ("forward", "backward")]


def work_of(base: BaseModel, step: int) -> list[DatumWork]:
    """Datums of both models in turns: texts, and pictures if the base takes them."""
    make = renderer(base)
    inputs: list[list[Chunk]] = [[random_tokens(10 * step + i, 9 + 5 * i)] for i in range(6)]
    if base.family.takes_images:
        for i, (width, height) in PICTURES[step].items():
            inputs[i] = picture_chunks(base, 10 * step + i, 8, width=width, height=height)
    return [datum(("four", "two")[i % 2], make.render(chunks), seed=i) for i, chunks in enumerate(inputs)]


def share_of(work: Sequence[T], step: int, rank: int, count: int) -> list[T]:
    """What a worker computes of a step."""
    return [each for each, owner in zip(work, OWNERS[step], strict=True) if owner % count == rank]


def gradients(backend: LocalBackend) -> dict[str, list[Tensor]]:
    """What both models have accumulated; nothing where there is nothing."""
    return {name: [total.to("cpu", copy=True) for total in backend.optimizers[name].gradients or []] for name in SHAPES}


def computed(backend: LocalBackend, work: Sequence[DatumWork], backward: bool = True) -> dict[str, Any]:
    """What a pass comes to, and the gradients that are there afterwards."""
    outcome = backend.run_pass(work, backward)
    return {"losses": [result and result.loss for result in outcome.results], "failures": outcome.failures, **gradients(backend)}


def step_of(backend: LocalBackend, step: int, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Compute a share, then step both models; all that comes of it."""
    return stepped(backend, computed(backend, share_of(work_of(backend.base, step), step, rank, count)))


def step_alone(backend: LocalBackend, step: int, count: int) -> dict[str, Any]:
    """Compute the shares of all `count` workers, one after another, then step both models; the losses in the order of the workers.

    Rows of other datums in the same pass would round otherwise, and how far that goes depends on the processor.
    """
    shares = [computed(backend, share_of(work_of(backend.base, step), step, rank, count)) for rank in range(count)]
    together = {"losses": [loss for share in shares for loss in share["losses"]], "failures": [share["failures"] for share in shares]}
    return stepped(backend, shares[-1] | together)


def stepped(backend: LocalBackend, found: dict[str, Any]) -> dict[str, Any]:
    """Step both models after what was found."""
    norms = {name: backend.optim_step(name, SETTINGS)["grad_norm"] for name in SHAPES}
    return found | {"norms": norms, "weights": {name: weights(backend, name) for name in SHAPES}}


def weights(backend: LocalBackend, name: str) -> list[Tensor]:
    """The masters of a model."""
    return [tensor.detach().to("cpu", copy=True) for tensor in backend.optimizers[name].weights.tensors()]


def take(backend: LocalBackend, masters: Mapping[str, Sequence[Tensor]]) -> None:
    """Go on with the workers' weights: what they round otherwise than one alone does not grow from step to step."""
    with torch.no_grad():
        for name, tensors in masters.items():
            own = backend.optimizers[name].weights
            for tensor, master in zip(own.tensors(), tensors, strict=True):
                tensor.copy_(master)
            own.refresh()


def create_models(backend: LocalBackend) -> None:
    """Those of SHAPES."""
    for name, shape in SHAPES.items():
        backend.create_model(name, shape)


def held_bytes() -> int:
    """Bytes of all tensors that this process can reach, each memory counted once."""
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter) and not found.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Dividing:
    """One process, and what it has found."""

    def __init__(self, group: ProcessGroup, directory: Path) -> None:
        self.group = group
        self.rank, self.count = group.place.rank, group.count
        self.directory = directory
        self.found: dict[str, Any] = {}

    def share(self, work: Sequence[DatumWork], step: int) -> list[DatumWork]:
        return share_of(work, step, self.rank, self.count)

    def keeps(self) -> None:
        """How many bytes are held before and after the layers are divided."""
        base = load(self.directory / "bases" / "deep", device=str(here()))
        whole = held_bytes()
        divide(base, self.group)
        assert isinstance(base.decoder, DividedDecoder)
        layers = base.decoder.divided
        self.found["keeps"] = whole, held_bytes(), layers.whole_bytes, layers.nbytes, layers.buffer_bytes

    def trains(self, name: str, dtype: str = "float32") -> DividedBackend:
        base = load(self.directory / "bases" / name, device=str(here()), dtype=dtype)
        divide(base, self.group)
        backend = DividedBackend(base, TRAINING, self.group)
        create_models(backend)
        self.found[f"{name} {dtype}"] = [step_of(backend, step, self.rank, self.count) for step in range(STEPS)]
        return backend

    def replicates(self, name: str) -> None:
        """The same steps with all weights here."""
        backend = LocalBackend(load(self.directory / "bases" / name, device=str(here())), TRAINING, self.group)
        create_models(backend)
        self.found[f"{name} replicas"] = [step_of(backend, step, self.rank, self.count) for step in range(STEPS)]

    def fails_alone(self, backend: DividedBackend) -> None:
        """Passes of which one attempt fails in the middle, on the second worker alone."""
        mine = self.share(work_of(backend.base, 7), 0)
        for kind, where in FAULTS:
            fault = torch.OutOfMemoryError("out of memory") if kind == "memory" else ValueError("bad")
            self.spoil(backend, fault, calls=2 if where == "forward" else len(backend.layers.parts) + 1)
            spoiled = computed(backend, mine)
            del vars(backend.layers)["layer"]
            for name in SHAPES:
                backend.clear_gradients(name)
            self.found[f"{kind} {where}"] = spoiled, computed(backend, mine)
            for name in SHAPES:
                backend.clear_gradients(name)

    def spoil(self, backend: DividedBackend, fault: Exception, calls: int) -> None:
        """Let the second worker fail when it is to compute a layer for the time number `calls`."""
        layers, left = backend.layers, calls
        whole = layers.layer

        def layer(index: int) -> Layer:
            nonlocal left
            left -= 1
            if left == 0 and self.rank == 1:
                raise fault
            return whole(index)

        layers.layer = layer  # type: ignore[method-assign]

    def refuses(self, backend: DividedBackend) -> None:
        """What this mode does not do, and what leaves no gradient."""
        unknown = [datum("nobody", each.rendered) for each in work_of(backend.base, 0)[:2]] if self.rank == 0 else []
        self.found["unknown"] = computed(backend, unknown)
        self.found["forward"] = computed(backend, self.share(work_of(backend.base, 0), 0), backward=False)

    def loads_and_saves(self, backend: DividedBackend) -> None:
        """A checkpoint of one worker alone goes on here; and one that was written here is for the test to load."""
        backend.restore("four", read_state(self.directory / "alone", backend.base, optimizer=True))
        self.found["restored"] = weights(backend, "four")
        backend.run_pass(self.share(work_of(backend.base, 1), 0), backward=True)
        backend.optim_step("four", SETTINGS)
        self.found["went on"] = weights(backend, "four")
        assert backend.copy_part("four", optimizer=True) is None
        if self.rank == 0:
            write_state(backend.copy_state("four", optimizer=True), self.directory / "together")
        backend.clear_gradients("two")

    def another_pass(self, backend: DividedBackend) -> None:
        """Workers that were told of different passes compute neither."""
        try:
            backend.run_pass([], backward=self.rank == 0)
        except DeviceLostError as error:
            self.found["another pass"] = str(error)


def main() -> None:
    """Go through all cases."""
    rank, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dividing = Dividing(ProcessGroup(Place(rank, count, f"file://{directory}/meeting"), begin(rank)), directory)
    if count < 4:
        dividing.keeps()
        text = dividing.trains("text")
        dividing.fails_alone(text)
        dividing.refuses(text)
        dividing.loads_and_saves(text)
        if count == 2:
            dividing.trains("text", "bfloat16")
        dividing.trains("hybrid")
        dividing.another_pass(text)
    if count != 3:
        dividing.trains("image")
        dividing.replicates("image")
    dividing.replicates("text")
    torch.save(dividing.found, directory / f"{rank}.pt")
    dividing.group.close()


if __name__ == "__main__":
    main()
