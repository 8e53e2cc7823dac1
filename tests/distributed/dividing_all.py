"""One of several processes that divide all weights of models: `python -m tests.distributed.dividing_all RANK COUNT DIRECTORY`.

It goes through all cases, in the same order as the others, and leaves in DIRECTORY/RANK.pt what each came to. The tiny models lie below
DIRECTORY/bases, and a checkpoint that a process alone has written is DIRECTORY/alone.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from tests.bases import datum, on_host, picture_chunks, random_tokens, renderer
from tests.distributed.devices import begin, here
from tests.distributed.dividing import SETTINGS, TRAINING, held_bytes
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Layer
from tinsmith.models.full import Weights
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.store.pieces import FilePiece, check_pieces, write_pieces
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state
from tinsmith.training.divided_backend import DividedBackend
from tinsmith.training.divided_decoder import divide
from tinsmith.training.divided_optimizer import DividedOptimizer
from tinsmith.training.divided_weights import gathered
from tinsmith.training.state_part import StatePart
from tinsmith.wire.chunks import Chunk

SHAPES = {"all": LoraShape(0, 0), "headless": LoraShape(0, 1, train_unembed=False), "lora": LoraShape(4, 2)}
"""Two models with weights of their own, and one that adds LoRA to those of the base, in the same passes."""
STEPS = 5
OWNERS = [(0, 1, 2, 1, 0, 2), (1, 1, 1, 1, 1, 1), (0, 0, 2, 2, 2, 0), (0, 1, 1, 0, 2, 2), (2, 0, 1, 1, 2, 0)]
"""Which worker computes each datum of a step, counted round the workers there are: at the second step all others have none."""
FAULTS = [(kind, where) for kind in ("memory", "other") for where in ("forward", "backward", "sum")]


def work_of(base: BaseModel, step: int) -> list[DatumWork]:
    """Of all models in turns; the last three with pictures, if the base takes them."""
    make = renderer(base)
    inputs: list[list[Chunk]] = [[random_tokens(10 * step + i, 9 + 5 * i)] for i in range(6)]
    if base.family.takes_images:
        inputs[3:] = [picture_chunks(base, 10 * step + i, 8, width=64 + 64 * (i % 2), height=64) for i in range(3)]
    return [datum(tuple(SHAPES)[i % 3], make.render(chunks), seed=i) for i, chunks in enumerate(inputs)]


def share_of(work: Sequence[Any], step: int, rank: int, count: int) -> list[Any]:
    """What a worker computes of a step."""
    return [each for each, owner in zip(work, OWNERS[step], strict=True) if owner % count == rank]


def whole(backend: LocalBackend, name: str, parts: Callable[[Any], Sequence[Tensor]]) -> dict[str, Tensor]:
    """What is laid out like the masters of a model, by the names of the parameters; put together by all where it is divided."""
    model = backend.optimizers[name]
    if not isinstance(model, DividedOptimizer):
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in zip(model.weights.named_tensors(), parts(model), strict=True)}
    found = {key: torch.full(shape, torch.nan) for row in model.divided.rows.values() for key, shape in row.shapes.items()}
    gathered(model.divided, dict(zip(model.divided.rows, parts(model), strict=True)), found)
    return found


def gradients(backend: LocalBackend) -> dict[str, dict[str, Tensor]]:
    """What all models with weights of their own have accumulated; nothing where there is nothing."""
    return {name: whole(backend, name, lambda model: model.gradients) if backend.optimizers[name].gradients else {} for name in FULL}


def weights(backend: LocalBackend) -> dict[str, dict[str, Tensor]]:
    """The masters of all models."""
    return {name: whole(backend, name, lambda model: model.weights.tensors()) for name in SHAPES}


FULL = [name for name, shape in SHAPES.items() if shape.rank == 0]


def create_models(backend: LocalBackend) -> None:
    """Those of SHAPES."""
    for name, shape in SHAPES.items():
        backend.create_model(name, shape)


def computed(backend: LocalBackend, work: Sequence[DatumWork], backward: bool = True) -> dict[str, Any]:
    """What a pass comes to, and the gradients that are there afterwards."""
    outcome = backend.run_pass(work, backward)
    losses = [result and result.loss for result in outcome.results]
    return {"losses": losses, "failures": outcome.failures, "gradients": gradients(backend)}


def step_of(backend: LocalBackend, step: int, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Compute a share, then step all models; all that comes of it."""
    return stepped(backend, share_computed(backend, step, rank, count))


def step_alone(backend: LocalBackend, step: int, count: int) -> dict[str, Any]:
    """Compute the shares of all `count` workers, one after another, then step all models; the losses in the order of the workers.

    Rows of other datums in the same pass would round otherwise, and how far that goes depends on the processor.
    """
    shares = [share_computed(backend, step, rank, count) for rank in range(count)]
    together = {"losses": [loss for share in shares for loss in share["losses"]], "failures": [share["failures"] for share in shares]}
    return stepped(backend, shares[-1] | together)


def share_computed(backend: LocalBackend, step: int, rank: int, count: int) -> dict[str, Any]:
    """A share in two passes, so that gradients are added up."""
    mine = share_of(work_of(backend.base, step), step, rank, count)
    first = backend.run_pass(mine[::2], backward=True)
    found = computed(backend, mine[1::2])
    found["losses"] = [result and result.loss for result in first.results] + found["losses"]
    found["failures"] = first.failures | found["failures"]
    return found


def stepped(backend: LocalBackend, found: dict[str, Any]) -> dict[str, Any]:
    """Step all models after what was found."""
    norms = {name: backend.optim_step(name, SETTINGS)["grad_norm"] for name in SHAPES}
    return found | {"norms": norms, "weights": weights(backend)}


def take(backend: LocalBackend, masters: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Go on with the workers' weights: what they round otherwise than one alone does not grow from step to step."""
    with torch.no_grad():
        for name, tensors in masters.items():
            own = backend.optimizers[name].weights
            for key, tensor in zip(own.named_tensors(), own.tensors(), strict=True):
                tensor.copy_(tensors[key])
            own.refresh()


def _copied(weights: Weights) -> dict[str, Tensor]:
    """What passes read of a snapshot."""
    return {name: tensor.detach().clone() for name, tensor in zip(weights.named_tensors(), weights.leaves(), strict=True)}


class DividingAll:
    """One process, and what it has found."""

    def __init__(self, group: ProcessGroup, directory: Path) -> None:
        self.group = group
        self.rank, self.count = group.place.rank, group.count
        self.directory = directory
        self.found: dict[str, Any] = {}
        self.kept: dict[str, Weights] = {}
        """The first snapshot of each model."""

    def backend(self, name: str, dtype: str = "float32", **settings: Any) -> DividedBackend:
        base = on_host(self.directory / "bases" / name, dtype, str(here()))
        divide(base, self.group)
        return DividedBackend(base, replace(TRAINING, **settings), self.group)

    def keeps(self) -> None:
        """How many bytes a model takes, and what was said that it would."""
        backend = self.backend("deep")
        before = held_bytes()
        backend.create_model("all", SHAPES["all"])
        model = backend.optimizers["all"]
        held, promised = held_bytes() - before, model.unclaimed
        self.found["keeps"] = held, model.weights.nbytes, promised, model.weights.parameter_count
        backend.run_pass([datum("all", renderer(backend.base).render([random_tokens(1, 9)]))] * (self.rank == 0), backward=True)
        backend.optim_step("all", SETTINGS)
        self.found["remembers"] = held_bytes() - before - held

    def trains(self, name: str, dtype: str = "float32") -> DividedBackend:
        backend = self.backend(name, dtype)
        create_models(backend)
        self.found[f"{name} {dtype}"] = [step_of(backend, step, self.rank, self.count) for step in range(STEPS)]
        return backend

    def fails_alone(self, backend: DividedBackend) -> None:
        """Passes of which one attempt fails in the middle, on the second worker alone."""
        make = renderer(backend.base)
        more = [datum("all", make.render([random_tokens(100 * self.rank + i, 11 + i)])) for i in range(2)]
        mine = share_of(work_of(backend.base, 0), 0, self.rank, self.count) + more
        self.clear(backend)
        expected = computed(backend, mine)
        self.clear(backend)
        for kind, where in FAULTS:
            fault = torch.OutOfMemoryError("out of memory") if kind == "memory" else ValueError("bad")
            undo = self.spoil(backend, fault, where)
            self.found[f"{kind} {where}"] = computed(backend, mine), expected
            undo()
            self.clear(backend)

    def clear(self, backend: DividedBackend) -> None:
        for name in SHAPES:
            backend.clear_gradients(name)

    def spoil(self, backend: DividedBackend, fault: Exception, where: str) -> Callable[[], None]:
        """Let the second worker fail once when it is to compute or to give away a layer of the model `all`."""
        model = backend.optimizers["all"]
        assert isinstance(model, DividedOptimizer)
        layers = model.divided.layers
        attribute = {"forward": "layer", "backward": "layer_to_train", "sum": "give"}[where]
        own = getattr(layers, attribute)
        left = 2

        def failing(*arguments: Any) -> Layer:
            nonlocal left
            left -= 1
            if left == 0 and self.rank == 1:
                raise fault
            return own(*arguments)  # type: ignore[no-any-return]

        setattr(layers, attribute, failing)
        return lambda: delattr(layers, attribute)

    def lacks_memory(self, backend: DividedBackend) -> None:
        """The second worker has no room for its part of the gradients, of the moments, or of a new model."""
        mine = share_of(work_of(backend.base, 0), 0, self.rank, self.count)
        model = backend.optimizers["all"]
        assert isinstance(model, DividedOptimizer)
        self.without("begin_pass", model)
        self.found["no room for gradients"] = computed(backend, mine)
        vars(model).pop("begin_pass", None)
        self.clear(backend)
        before = weights(backend)["all"]
        for bad in ("claim_moments", "_checked"):
            backend.run_pass(mine, backward=True)
            self.without(bad, model)
            self.found[f"no room in {bad}"] = self.refused(lambda: backend.optim_step("all", SETTINGS)), model.totals is None
            vars(model).pop(bad, None)
            self.clear(backend)
        self.without("_require_memory", backend)
        self.found["no room for a model"] = self.refused(lambda: backend.create_model("more", SHAPES["all"])), "more" in backend.optimizers
        vars(backend).pop("_require_memory", None)
        backend.run_pass(mine, backward=True)
        for part in (model.totals or [])[:1]:
            part[0] = torch.nan if self.rank == 1 else part[0]
        self.found["nan"] = self.refused(lambda: backend.optim_step("all", SETTINGS)), model.totals is None
        backend.run_pass(mine, backward=True)
        overflowing = replace(SETTINGS, lr=1e38, eps=0.0)
        self.found["overflow"] = self.refused(lambda: backend.optim_step("all", overflowing)), model.totals is None
        self.found["unchanged"] = before, weights(backend)["all"]
        self.clear(backend)

    def lacks_memory_at_first(self, backend: DividedBackend) -> None:
        """The second worker has no room for the moments of a model's first step; the model is saved then, and makes that step."""
        backend.create_model("new", SHAPES["all"])
        mine = [datum("new", renderer(backend.base).render([random_tokens(self.rank, 9)]))]
        model = backend.optimizers["new"]
        backend.run_pass(mine, backward=True)
        self.without("claim_moments", model)
        self.refused(lambda: backend.optim_step("new", SETTINGS))
        vars(model).pop("claim_moments", None)
        self.save(backend, "new", "saved at first")
        backend.run_pass(mine, backward=True)
        self.found["first step"] = backend.optim_step("new", SETTINGS)["grad_norm"], len(model.moments())
        backend.delete_model("new")

    def save(
        self, backend: DividedBackend, model_id: str, name: str, optimizer: bool = True, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Write this worker's part of a checkpoint, all but its beginning after something else was done meanwhile.

        The last worker finds that nothing is missing.
        """
        part = backend.copy_part(model_id, optimizer)
        assert part is not None
        done = Event()

        def pieces(part: StatePart) -> Iterator[FilePiece]:
            for piece in part.pieces():
                yield piece
                done.wait()

        with ThreadPoolExecutor(1) as beside:
            written = beside.submit(write_pieces, self.directory / name, pieces(part), between_hosts=name == "together")
            try:
                meanwhile()
            finally:
                done.set()
        told = [tuple(piece) for text in self.group.texts(json.dumps(written.result())) for piece in json.loads(text)]
        if self.rank == self.count - 1:
            check_pieces(self.directory / name, told)
        own = sum(size for _, _, size, _ in written.result())
        self.found[f"{name} bytes"] = own, sum(size for _, _, size, _ in told)
        self.group.agree(0, "that all have come here")

    def without(self, method: str, of: object, rank: int = 1) -> None:
        """Let a method find no memory on one worker, the second unless another is named."""

        def lacking(*arguments: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        if self.rank == rank:
            setattr(of, method, lacking)

    def refused(self, act: Callable[[], object]) -> str:
        """The error of something that is refused."""
        try:
            act()
        except TinsmithError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def refuses(self, backend: DividedBackend) -> None:
        """What this mode does not do, and what leaves no gradient."""
        for switch in ("train_mlp", "train_attn"):
            shape = replace(SHAPES["all"], **{switch: False})
            self.found[switch] = self.refused(lambda shape=shape: backend.create_model("part", shape))  # type: ignore[misc]
        compact = DividedBackend(backend.base, replace(TRAINING, full_state="compact"), self.group)
        self.found["compact"] = self.refused(lambda: compact.create_model("compact", SHAPES["all"]))
        self.found["snapshot"] = self.refused(lambda: backend.snapshot("all", WeightsRef("tiny", "k", "k", None)))
        self.found["forward"] = computed(backend, share_of(work_of(backend.base, 0), 0, self.rank, self.count), backward=False)
        self.found["no gradients"] = backend.optim_step("all", SETTINGS)

    def gives_snapshots(self, backend: DividedBackend) -> None:
        """Copies that the first worker samples from: before a step, and behind it; what the second cannot do is refused on both."""
        backend.gives_snapshots = self.rank == 0
        for step, name in enumerate(("first snapshot", "later snapshot")):
            backend.run_pass(share_of(work_of(backend.base, step), step, self.rank, self.count), backward=True)
            for model in SHAPES:
                backend.optim_step(model, SETTINGS)
            self.found[name] = {model: self.snapshot(backend, model) for model in SHAPES}
            self.found[f"{name} of"] = weights(backend)
        self.found["first snapshot, read again"] = {model: _copied(self.kept[model]) for model in FULL} if self.rank == 0 else {}
        self.without("_room_for_snapshot", backend, rank=0)
        self.found["no room for a snapshot"] = self.refused(lambda: self.snapshot(backend, "all"))
        vars(backend).pop("_room_for_snapshot", None)
        self.found["no such model"] = self.refused(lambda: self.snapshot(backend, "nobody"))
        refusal = UserError("vLLM has no such adapters") if self.rank == 0 else None
        self.found["cannot be sampled"] = self.refused(lambda: backend.agree_to_create(refusal))
        backend.agree_to_create(None)
        backend.gives_snapshots = False

    def snapshot(self, backend: DividedBackend, model: str) -> tuple[str, dict[str, Tensor]]:
        """A snapshot's precision and its numbers; nothing on workers that help. The first snapshot of each model is kept."""
        if self.rank > 0:
            backend.help_to_snapshot(model)
            return "", {}
        taken = backend.snapshot(model, WeightsRef("tiny", model, model, None))
        self.kept.setdefault(model, taken)
        return str(taken.dtype), _copied(taken)

    def loads_and_saves(self, backend: DividedBackend) -> None:
        """A checkpoint of one worker alone goes on here; and those that are written here are for the test to load.

        Of the first of these each worker writes its part while all take the next step.
        """
        backend.restore("all", read_state(self.directory / "alone", backend.base, optimizer=True))
        self.found["restored"] = weights(backend)["all"]

        def step() -> None:
            backend.run_pass(share_of(work_of(backend.base, 1), 0, self.rank, self.count), backward=True)
            backend.optim_step("all", SETTINGS)

        self.save(backend, "all", "again", meanwhile=step)
        self.found["went on"] = weights(backend)["all"]
        self.save(backend, "all", "together")
        self.save(backend, "all", "weights alone", optimizer=False)
        self.without("_require_memory", backend)
        self.found["no room for a copy"] = self.refused(lambda: backend.copy_part("all", optimizer=True))
        vars(backend).pop("_require_memory", None)
        self.found["no such model"] = self.refused(lambda: backend.copy_part("nobody", optimizer=True))
        backend.delete_model("all")
        backend.restore("all", read_state(self.directory / "alone", backend.base))
        self.clear(backend)


def main() -> None:
    """Go through all cases."""
    rank, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dividing = DividingAll(ProcessGroup(Place(rank, count, f"file://{directory}/meeting"), begin(rank)), directory)
    dividing.keeps()
    text = dividing.trains("text")
    dividing.fails_alone(text)
    dividing.lacks_memory(text)
    dividing.lacks_memory_at_first(text)
    dividing.refuses(text)
    dividing.gives_snapshots(text)
    dividing.loads_and_saves(text)
    if count == 2:
        dividing.trains("image")
        dividing.trains("hybrid")
        half = dividing.trains("text", "bfloat16")
        half.gives_snapshots = rank == 0
        dividing.found["snapshot in bfloat16"] = dividing.snapshot(half, "all")
        dividing.found["snapshot in bfloat16 of"] = weights(half)["all"]
    torch.save(dividing.found, directory / f"{rank}.pt")
    dividing.group.close()


if __name__ == "__main__":
    main()
