"""One of several processes that train the same models: `python -m tests.distributed.dividing RANK COUNT DIRECTORY`.

They divide the layers of base models and all weights of the models that have their own, or are replicas, of which each has everything. Tiny
models lie below DIRECTORY/bases.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.bases import datum, load, on_host, picture_chunks, random_tokens, renderer
from tests.distributed.devices import Member, here
from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.store.pieces import FilePiece, check_pieces, write_pieces
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.divided_backend import DividedBackend
from tinsmith.training.divided_decoder import DividedDecoder, divide
from tinsmith.training.divided_optimizer import DividedOptimizer
from tinsmith.training.divided_weights import gathered
from tinsmith.training.state_part import StatePart
from tinsmith.wire.chunks import Chunk

T = TypeVar("T")

TRAINING = TrainingConfig(logits_chunk=64)
SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1, grad_clip_norm=50.0)
"""eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
SHAPES = {
    "four": LoraShape(4, 0),
    "two": LoraShape(2, 1, train_unembed=False),
    "all": LoraShape(0, 0),
    "headless": LoraShape(0, 1, train_unembed=False),
}
"""Two models that add LoRA to the weights of the base, of other ranks, and two with weights of their own."""
LORA = [name for name, shape in SHAPES.items() if shape.rank]
FULL = [name for name, shape in SHAPES.items() if not shape.rank]
SAVED = ("four", "all")
"""Models that are saved: one of each kind."""
OWNERS = [
    (0, 0, 1, 0, 1, 1, 2, 2),
    (1, 1, 1, 1, 1, 1, 1, 1),
    (0, 0, 2, 2, 2, 0, 2, 0),
    (1, 2, 0, 1, 0, 0, 1, 0),
    (2, 1, 1, 0, 1, 0, 0, 2),
]
"""Which worker computes each datum of a step, counted round the workers there are: at the second step all others have none."""
STEPS = len(OWNERS)
PICTURES = [{4: (320, 64), 5: (384, 64), 6: (64, 64), 7: (128, 64)}] * 4 + [{1: (64, 64), 2: (96, 64), 3: (448, 448), 4: (64, 96)}]
"""Which datums of a step have pictures, and of which width and height, if the base takes them.

At the last step one worker has several small ones and another one of 196 tokens; the last of three workers has text alone.
"""
FAULTS = {
    "forward": ("base", "layer", 2),
    "backward": ("base", "layer", 3),
    "forward of all weights": ("all", "layer", 2),
    "backward of all weights": ("all", "layer_to_train", 2),
    "sum of all weights": ("all", "give", 2),
}
"""Whose layers fail on the second worker alone, at which call for one. There are two: the third call is the first of the backward."""


def work_of(base: BaseModel, step: int) -> list[DatumWork]:
    """Datums of all models in turns: texts, and pictures if the base takes them."""
    make = renderer(base)
    inputs: list[list[Chunk]] = [[random_tokens(10 * step + i, 9 + 5 * i)] for i in range(len(OWNERS[0]))]
    if base.family.takes_images:
        for i, (width, height) in PICTURES[step].items():
            inputs[i] = picture_chunks(base, 10 * step + i, 8, width=width, height=height)
    return [datum(tuple(SHAPES)[i % len(SHAPES)], make.render(chunks), seed=i) for i, chunks in enumerate(inputs)]


def share_of(work: Sequence[T], step: int, rank: int, count: int) -> list[T]:
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
    """What all models have accumulated; nothing where there is nothing."""
    return {name: whole(backend, name, lambda model: model.gradients) if backend.optimizers[name].gradients else {} for name in SHAPES}


def weights(backend: LocalBackend, *models: str) -> dict[str, dict[str, Tensor]]:
    """The masters of these models, or of all."""
    return {name: whole(backend, name, lambda model: model.weights.tensors()) for name in models or SHAPES}


def create_models(backend: LocalBackend) -> None:
    """Those of SHAPES."""
    for name, shape in SHAPES.items():
        backend.create_model(name, shape)


def clear(backend: LocalBackend) -> None:
    """Forget all gradients."""
    for name in SHAPES:
        backend.clear_gradients(name)


def computed(backend: LocalBackend, work: Sequence[DatumWork], backward: bool = True) -> dict[str, Any]:
    """What a pass comes to, and the gradients that are there afterwards."""
    outcome = backend.run_pass(work, backward)
    losses = [result and result.loss for result in outcome.results]
    return {"losses": losses, "failures": outcome.failures, "gradients": gradients(backend)}


def share_computed(backend: LocalBackend, step: int, rank: int, count: int) -> dict[str, Any]:
    """A share in two passes, so that gradients are added up."""
    mine = share_of(work_of(backend.base, step), step, rank, count)
    first = backend.run_pass(mine[:1], backward=True)
    found = computed(backend, mine[1:])
    found["losses"] = [result and result.loss for result in first.results] + found["losses"]
    found["failures"] = first.failures | found["failures"]
    return found


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


def copied(weights: Weights) -> dict[str, Tensor]:
    """What passes read of a snapshot."""
    return {name: tensor.detach().clone() for name, tensor in zip(weights.named_tensors(), weights.leaves(), strict=True)}


def held_bytes() -> int:
    """Bytes of all tensors that this process can reach, each memory counted once."""
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter) and not found.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def refused(act: Callable[[], object]) -> str:
    """The error of something that is refused."""
    try:
        act()
    except TinsmithError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Dividing(Member):
    """One process that divides weights."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Weights] = {}
        """The first snapshot of each model."""

    def share(self, backend: LocalBackend, step: int) -> list[DatumWork]:
        """What this worker computes of a step."""
        return share_of(work_of(backend.base, step), step, self.rank, self.count)

    def keeps(self) -> None:
        """How many bytes are held before and after the layers are divided, and for a model, and what was said that there would be."""
        base = load(self.directory / "bases" / "deep", device=str(here()))
        undivided = held_bytes()
        divide(base, self.group)
        assert isinstance(base.decoder, DividedDecoder)
        layers = base.decoder.divided
        before = held_bytes()
        self.found["keeps layers"] = undivided, before, layers.whole_bytes, layers.nbytes, layers.buffer_bytes
        backend = DividedBackend(base, TRAINING, self.group)
        backend.create_model("all", SHAPES["all"])
        model = backend.optimizers["all"]
        held, promised = held_bytes() - before, model.unclaimed
        self.found["keeps a model"] = held, model.weights.nbytes, promised, model.weights.parameter_count
        backend.run_pass([datum("all", renderer(base).render([random_tokens(1, 9)]))] * (self.rank == 0), backward=True)
        backend.optim_step("all", SETTINGS)
        self.found["remembers"] = held_bytes() - before - held

    def trains(self, name: str, dtype: str = "float32") -> DividedBackend:
        base = on_host(self.directory / "bases" / name, dtype, str(here()))
        divide(base, self.group)
        backend = DividedBackend(base, TRAINING, self.group)
        self.steps(f"{name} {dtype}", backend)
        return backend

    def replicates(self, name: str) -> None:
        """The same steps with all weights here."""
        base = load(self.directory / "bases" / name, device=str(here()))
        self.steps(f"{name} replicas", LocalBackend(base, TRAINING, self.group))

    def steps(self, case: str, backend: LocalBackend) -> None:
        create_models(backend)
        self.found[case] = [step_of(backend, step, self.rank, self.count) for step in range(STEPS)]

    def fails_alone(self, backend: DividedBackend) -> None:
        """Passes of which one attempt fails in the middle, on the second worker alone."""
        make = renderer(backend.base)
        more = [datum("all", make.render([random_tokens(100 * self.rank + i, 11 + i)])) for i in range(2)]
        mine = self.share(backend, 0) + more
        expected = computed(backend, mine)
        clear(backend)
        for kind, fault in (("memory", torch.OutOfMemoryError("out of memory")), ("other", ValueError("bad"))):
            for where, (of, method, calls) in FAULTS.items():
                model = backend.optimizers["all"]
                assert isinstance(model, DividedOptimizer)
                with self.failing(backend.layers if of == "base" else model.divided.layers, method, fault, calls):
                    self.found[f"{kind} {where}"] = computed(backend, mine), expected
                clear(backend)

    @contextmanager
    def failing(self, of: Any, method: str, fault: Exception, calls: int = 0, rank: int = 1) -> Iterator[None]:
        """Let a method fail on one worker, the second unless another is named: the call of that number, or each."""
        own, left = getattr(of, method), calls

        def fails(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if self.rank == rank and (left == 0 or calls == 0):
                raise fault
            return own(*arguments)

        setattr(of, method, fails)
        try:
            yield
        finally:
            delattr(of, method)

    def without_memory(self, of: object, method: str, rank: int = 1) -> Any:
        """Let a method find no memory on one worker."""
        return self.failing(of, method, torch.OutOfMemoryError("out of memory"), rank=rank)

    def lacks_memory(self, backend: DividedBackend) -> None:
        """The second worker has no room for its part of the gradients, of the moments, or of a new model."""
        mine = self.share(backend, 0)
        model = backend.optimizers["all"]
        with self.without_memory(model, "begin_pass"):
            self.found["no room for gradients"] = computed(backend, mine)
        clear(backend)
        before = weights(backend, "all")
        for lacking in ("claim_moments", "_checked"):
            backend.run_pass(mine, backward=True)
            with self.without_memory(model, lacking):
                self.found[f"no room in {lacking}"] = refused(lambda: backend.optim_step("all", SETTINGS)), model.totals is None
            clear(backend)
        with self.without_memory(backend, "_require_memory"):
            error = refused(lambda: backend.create_model("more", SHAPES["all"]))
            self.found["no room for a model"] = error, "more" in backend.optimizers
        backend.run_pass(mine, backward=True)
        for part in (model.totals or [])[:1]:
            part[0] = torch.nan if self.rank == 1 else part[0]
        self.found["nan"] = refused(lambda: backend.optim_step("all", SETTINGS)), model.totals is None
        backend.run_pass(mine, backward=True)
        overflowing = replace(SETTINGS, lr=1e38, eps=0.0)
        self.found["overflow"] = refused(lambda: backend.optim_step("all", overflowing)), model.totals is None
        self.found["unchanged"] = before["all"], weights(backend, "all")["all"]
        clear(backend)

    def lacks_memory_at_first(self, backend: DividedBackend) -> None:
        """The second worker has no room for the moments of a model's first step; the model is saved then, and makes that step."""
        backend.create_model("new", SHAPES["all"])
        mine = [datum("new", renderer(backend.base).render([random_tokens(self.rank, 9)]))]
        model = backend.optimizers["new"]
        backend.run_pass(mine, backward=True)
        with self.without_memory(model, "claim_moments"):
            refused(lambda: backend.optim_step("new", SETTINGS))
        self.write(backend, "new", "saved at first")
        backend.run_pass(mine, backward=True)
        self.found["first step"] = backend.optim_step("new", SETTINGS)["grad_norm"], len(model.moments())
        backend.delete_model("new")

    def write(
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
            written = beside.submit(write_pieces, self.directory / name, pieces(part), between_hosts=name == "all together")
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

    def refuses(self, backend: DividedBackend) -> None:
        """What this mode does not do, and what leaves no gradient."""
        for switch in ("train_mlp", "train_attn"):
            shape = replace(SHAPES["all"], **{switch: False})
            self.found[switch] = refused(lambda shape=shape: backend.create_model("part", shape))  # type: ignore[misc]
        compact = DividedBackend(backend.base, replace(TRAINING, full_state="compact"), self.group)
        self.found["compact"] = refused(lambda: compact.create_model("compact", SHAPES["all"]))
        self.found["snapshot"] = refused(lambda: backend.snapshot("all", WeightsRef("tiny", "k", "k", None)))
        unknown = [datum("nobody", each.rendered) for each in work_of(backend.base, 0)[:2]] if self.rank == 0 else []
        self.found["unknown"] = computed(backend, unknown)
        self.found["forward"] = computed(backend, self.share(backend, 0), backward=False)
        self.found["no gradients"] = backend.optim_step("all", SETTINGS)
        try:
            backend.run_pass([], backward=self.rank == 0)
        except DeviceLostError as error:
            self.found["another pass"] = str(error)

    def gives_snapshots(self, backend: DividedBackend) -> None:
        """Copies that the first worker samples from: before a step, and behind it; what the second cannot do is refused on both."""
        backend.gives_snapshots = self.rank == 0
        for step, name in enumerate(("first snapshot", "later snapshot")):
            backend.run_pass(self.share(backend, step), backward=True)
            for model in SHAPES:
                backend.optim_step(model, SETTINGS)
            self.found[name] = {model: self.snapshot(backend, model) for model in SHAPES}
            self.found[f"{name} of"] = weights(backend)
        self.found["first snapshot, read again"] = {model: copied(self.kept[model]) for model in FULL} if self.rank == 0 else {}
        with self.without_memory(backend, "_room_for_snapshot", rank=0):
            self.found["no room for a snapshot"] = refused(lambda: self.snapshot(backend, "all"))
        self.found["no such model to sample"] = refused(lambda: self.snapshot(backend, "nobody"))
        refusal = UserError("vLLM has no such adapters") if self.rank == 0 else None
        self.found["cannot be sampled"] = refused(lambda: backend.agree_to_create(refusal))
        backend.agree_to_create(None)
        backend.gives_snapshots = False

    def snapshot(self, backend: DividedBackend, model: str) -> tuple[str, dict[str, Tensor]]:
        """A snapshot's precision and its numbers; nothing on workers that help. The first snapshot of each model is kept."""
        if self.rank > 0:
            backend.help_to_snapshot(model)
            return "", {}
        taken = backend.snapshot(model, WeightsRef("tiny", model, model, None))
        self.kept.setdefault(model, taken)
        return str(taken.dtype), copied(taken)

    def saved_alone(self) -> None:
        """The first worker trains models for a step as if it were alone."""
        if self.rank == 0:
            backend = LocalBackend(load(self.directory / "bases" / "text", device=str(here())), TRAINING)
            create_models(backend)
            step_of(backend, 0)
            for name in SAVED:
                write_state(backend.copy_state(name, optimizer=True), self.directory / f"{name} alone")
        self.group.agree(0, "that all have come here")

    def loads_and_saves(self, backend: DividedBackend) -> None:
        """Checkpoints of one worker alone go on here; and those that are written here are for the test to load.

        Of the first of these each worker writes its part while all take the next step.
        """
        self.saved_alone()
        for name in SAVED:
            backend.restore(name, read_state(self.directory / f"{name} alone", backend.base, optimizer=True))
        self.found["restored"] = weights(backend, *SAVED)

        def step() -> None:
            backend.run_pass(share_of(work_of(backend.base, 1), 0, self.rank, self.count), backward=True)
            for name in SAVED:
                backend.optim_step(name, SETTINGS)

        self.write(backend, "all", "all again", meanwhile=step)
        self.found["went on"] = weights(backend, *SAVED)
        self.write(backend, "all", "all together")
        self.write(backend, "all", "weights alone", optimizer=False)
        assert backend.copy_part("four", optimizer=True) is None
        if self.rank == 0:
            write_state(backend.copy_state("four", optimizer=True), self.directory / "four together")
        with self.without_memory(backend, "_require_memory"):
            self.found["no room for a copy"] = refused(lambda: backend.copy_part("all", optimizer=True))
        self.found["no such model to copy"] = refused(lambda: backend.copy_part("nobody", optimizer=True))


def main() -> None:
    """Go through all cases; of three processes only through those in which uneven shares or parts can go wrong."""
    dividing = Dividing()
    dividing.keeps()
    text = dividing.trains("text")
    dividing.fails_alone(text)
    dividing.lacks_memory_at_first(text)
    dividing.gives_snapshots(text)
    dividing.loads_and_saves(text)
    dividing.trains("image")
    if dividing.count == 2:
        dividing.lacks_memory(text)
        dividing.refuses(text)
        dividing.trains("hybrid")
        half = dividing.trains("text", "bfloat16")
        half.gives_snapshots = dividing.rank == 0
        dividing.found["snapshot in bfloat16"] = dividing.snapshot(half, "all")
        dividing.found["snapshot in bfloat16 of"] = weights(half, "all")["all"]
        dividing.replicates("image")
    dividing.replicates("text")
    dividing.save()
    dividing.group.close()


if __name__ == "__main__":
    main()
