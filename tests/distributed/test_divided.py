"""Processes that divide the weights of models, or are replicas, train as one that has all of them, and each keeps its part alone.

Each is `python -m tests.distributed.test_divided RANK COUNT DIRECTORY`; tiny models lie below DIRECTORY/bases.

Invariant: Workers that divide the weights train what one trains, each keeps its part alone, and one that has nothing or fails lets no
other wait.
Also: `tests/distributed/test_replicas.py`.

Invariant: Workers that share all weights write the files of one worker, byte for byte, each its part; when one cannot write, or dies,
there is no checkpoint and nothing is left of it.
Also: `tests/distributed/test_saving_together.py`, `tests/worker/test_joint_saves.py`, `tests/store/test_pieces.py`,
`tests/training/test_checkpoint.py`, `tests/engine/test_worker_group.py`.

Invariant: All weights, divided, train as on one worker; an attempt that fails on one alone counts no gradient twice and loses none; what
one lacks memory for is refused on all.
Also: `tests/distributed/test_replicas.py`.

Invariant: A snapshot of divided weights is of one step, to the last bit, and stays; one that fails on a worker is refused on all.
Also: `tests/engine/test_worker_group.py`.
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import datum, load, on_host, picture_chunks, random_tokens, renderer
from tests.distributed.conftest import Processes
from tests.distributed.devices import EXACT, EXACT_IN_HALF, ON_GPUS, Member, here
from tests.extent import EVERYTHING, amount, slow
from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights, divided_full_bytes
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
    (2, 1, 1, 0, 1, 0, 0, 2),
    (0, 0, 2, 2, 2, 0, 2, 0),
    (1, 2, 0, 1, 0, 0, 1, 0),
]
"""Which worker computes each datum of a step, counted round the workers there are: at the second step all others have none."""
STEPS = amount(3, len(OWNERS))
"""The moments matter from the second step on. Those that are left out have other shares of the same kinds."""
UNLIKE = 2
"""The step whose pictures differ much in size."""
PICTURES = [{4: (320, 64), 5: (384, 64), 6: (64, 64), 7: (128, 64)}] * len(OWNERS)
PICTURES[UNLIKE] = {1: (64, 64), 2: (96, 64), 3: (448, 448), 4: (64, 96)}
"""Which datums of a step have pictures, and of which width and height, if the base takes them.

At step `UNLIKE` one worker has several small ones and another one of 196 tokens; the last of three workers has text alone.
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
    if dividing.count == 2 or EVERYTHING:
        dividing.fails_alone(text)
    dividing.lacks_memory_at_first(text)
    if dividing.count == 2 or EVERYTHING:
        dividing.gives_snapshots(text)
    dividing.loads_and_saves(text)
    if dividing.count == 2 or EVERYTHING:
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
    if EVERYTHING:
        dividing.replicates("text")
    dividing.save()
    dividing.group.close()


WITHIN = 1e-5
"""Of the largest number of a tensor: gradients are added up in another order."""
WITHIN_IN_ONE_PASS = 1e-3
"""At least, against a single pass of all datums: rows of other datums round otherwise, and how far that goes depends on the processor."""
HYBRID_WITHIN = 5e-3 if ON_GPUS else 1e-4
"""Delta nets hand on from token to token what is rounded otherwise; on a GPU that differs with every run."""
OUT_OF_MEMORY = "TinsmithError: worker 1 of 2: out of memory"


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].cpu() - tensor.cpu()).abs().max() <= within * tensor.abs().max(), name


def summed(of_workers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of all workers together; those without a share have none."""
    there = [each for each in of_workers if each]
    return {name: torch.stack([each[name] for each in there]).sum(0) for name in there[0]}


def backend_of(directory: Path, **options: Any) -> LocalBackend:
    """A worker that has all weights of all models."""
    backend = LocalBackend(load(directory, **options), TRAINING)
    create_models(backend)
    return backend


TRAINED = [
    *((2, name, "float32", WITHIN) for name in ("text", "image")),
    (3, "text", "float32", WITHIN),  # shares and parts are uneven
    (2, "hybrid", "float32", HYBRID_WITHIN),
    (2, "image", "replicas", WITHIN),
    # Three with text are uneven too, and replicas of a text model are in test_together.py.
    *slow((3, "image", "float32", WITHIN), (2, "text", "replicas", WITHIN), (3, "text", "replicas", WITHIN)),
]
"""How many processes train which base, dividing its layers in float32 or as replicas, and how near to one worker."""


@pytest.mark.parametrize(("count", "name", "how", "within"), TRAINED)
def test_losses_gradients_and_weights_are_those_of_one_worker(
    processes: Processes, bases: Path, count: int, name: str, how: str, within: float
) -> None:
    """Of several models in the same passes, also where one worker computes all of a step, or has one picture much larger than others.

    Each parameter counts once in the norm.
    """
    _, found = processes("test_divided", count)
    alone, whole = backend_of(bases / name), backend_of(bases / name)
    in_one_pass = computed(whole, work_of(whole.base, 0))["gradients"]
    for step in range(STEPS):
        expected = step_alone(alone, step, count)
        of_step = [of_process[f"{name} {how}"][step] for of_process in found]
        assert all(each["failures"] == {} for each in of_step)
        assert not any(expected["failures"])
        losses = [loss for each in of_step for loss in each["losses"]]
        # Weights of any sign cancel in a loss: its terms are of the size of the largest one.
        assert losses == pytest.approx(expected["losses"], rel=within, abs=within * max(map(abs, expected["losses"])))
        assert [len(each["losses"]) for each in of_step] == [len(share_of(range(8), step, rank, count)) for rank in range(count)]
        for model in SHAPES:
            totals = [each["gradients"][model] for each in of_step]
            if how != "replicas" and model in FULL:
                for other in totals[1:]:
                    assert_near(other, totals[0], 0)  # they have added them up
                totals = totals[:1]
            total = summed(totals)
            if step == 0:
                assert_near(total, in_one_pass[model], max(within, WITHIN_IN_ONE_PASS))
            assert_near(total, expected["gradients"][model], within)
            # B begins with zeros, so that A has no gradient before the first step. Every parameter has one later.
            there = [bool(gradient.any()) for gradient in total.values()]
            assert sum(there) == (len(there) // 2 if step == 0 and model in LORA else len(there))
            for each in of_step:
                assert each["norms"][model] == pytest.approx(expected["norms"][model], rel=within)
                assert_near(each["weights"][model], expected["weights"][model], within)
                assert_near(each["weights"][model], of_step[0]["weights"][model], 0)
        take(alone, of_step[0]["weights"])


def test_pictures_of_a_step_differ_in_size_from_worker_to_worker() -> None:
    """As many as 196 tokens here and several of a few there, with texts alone where there are more than two workers."""
    sizes = PICTURES[UNLIKE]
    for count in (2, 3):
        shares = [[sizes[place] for place in share_of(range(8), UNLIKE, rank, count) if place in sizes] for rank in range(count)]
        assert shares == [[(448, 448)], [(64, 64), (96, 64), (64, 96)], *([] for _ in range(2, count))]


@pytest.mark.parametrize(("name", "dtype"), [("text", "float32"), ("image", "float32"), ("hybrid", "float32"), ("text", "bfloat16")])
def test_a_share_has_the_gradients_of_a_worker_with_all_weights(processes: Processes, bases: Path, name: str, dtype: str) -> None:
    """To the last bit on a CPU where each worker adds up its own: LoRA in float32 over a base in bfloat16 too.

    Gradients in half precision of all weights are added up in float32.
    """
    _, found = processes("test_divided", 2)
    within = EXACT_IN_HALF if dtype == "bfloat16" else HYBRID_WITHIN if EXACT and name == "hybrid" else EXACT
    together = backend_of(bases / name, dtype=dtype)
    for rank, of_process in enumerate(found):
        backend = backend_of(bases / name, dtype=dtype)
        expected = share_computed(backend, 0, rank, 2)["gradients"]
        for model in LORA:
            assert_near(of_process[f"{name} {dtype}"][0]["gradients"][model], expected[model], within)
        of_all = share_computed(together, 0, rank, 2)["gradients"]
    for of_process in found:
        for model in FULL:
            near = max(within, 1e-6 if dtype == "bfloat16" else HYBRID_WITHIN if name == "hybrid" else WITHIN)
            assert_near(of_process[f"{name} {dtype}"][0]["gradients"][model], of_all[model], near)
    first, second = (of_process[f"{name} {dtype}"][-1]["weights"] for of_process in found)
    for model in SHAPES:
        assert_near(first[model], second[model], 0)


@pytest.mark.parametrize("count", [2, 3])
def test_each_keeps_its_part_alone(processes: Processes, bases: Path, count: int) -> None:
    """Of 8 layers: what is freed is what the others keep, but for two buffers of the size of a layer.

    And of a model's masters and moments; what lies around the layers is whole as well. It is no more than what was to be taken.
    """
    base = load(bases / "deep")
    sizes = [sum(parameter.numel() for parameter in base.language_model.layers[index].parameters()) for index in range(8)]
    around = sum(parameter.numel() for parameter in base.full_targets(SHAPES["all"]).values()) - sum(sizes)
    needed = divided_full_bytes(sizes, around, torch.float32, count)
    for found in processes("test_divided", count)[1]:
        before, after, layers, kept, buffers = found["keeps layers"]
        slack = 8 * 32 * 64 * count  # tensors begin at multiples of 64 bytes, and parts are of one size
        assert layers / count <= kept <= layers / count + slack
        assert layers / 4 <= buffers <= layers / 4 + slack
        assert abs(before - after - (layers - kept - buffers)) <= slack
        held, told, promised, parameters = found["keeps a model"]
        slack = 4 * 64 * count * 12  # rows end at multiples of 64 numbers for each worker
        assert parameters == sum(sizes) + around
        expected = 4 * (parameters / count + around + max(sizes))  # masters, whole tensors, the buffer of sums
        assert expected <= told <= expected + slack
        assert told <= held <= told + slack
        assert 0 <= needed.device - told - promised <= slack
        assert abs(found["remembers"] - needed.moments) <= slack


@pytest.mark.parametrize("count", [2, *slow(3)])  # three differ in uneven parts, of which losses, weights and files are above or below
@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.parametrize("kind", ["memory", "other"])
def test_what_fails_on_one_alone_counts_nothing_twice_and_loses_nothing(processes: Processes, count: int, kind: str, where: str) -> None:
    """It goes on in halves there, as a worker alone does; the others put the layers together for it and wait for nothing else.

    Of a model whose weights are divided all compute the attempt again.
    """
    for rank, found in enumerate(processes("test_divided", count)[1]):
        spoiled, whole = found[f"{kind} {where}"]
        assert spoiled["failures"] == whole["failures"] == {}
        assert spoiled["losses"] == pytest.approx(whole["losses"], rel=WITHIN)
        for model in SHAPES:
            within = EXACT if model in LORA and rank != 1 and "all" not in where else WITHIN
            assert_near(spoiled["gradients"][model], whole["gradients"][model], within)


def test_a_worker_without_memory_lets_nobody_wait(processes: Processes) -> None:
    """What it has no room for is refused on all workers, and weights stay as they were."""
    for rank, found in enumerate(processes("test_divided", 2)[1]):
        lacking = found["no room for gradients"]
        assert lacking["gradients"]["all"] == {}
        assert lacking["gradients"]["headless"]  # another model, in the same pass
        mine = share_of([tuple(SHAPES)[place % 4] for place in range(8)], 0, rank, 2)
        assert sorted(lacking["failures"]) == [place for place, model in enumerate(mine) if model == "all"]
        for case in ("claim_moments", "_checked"):
            assert found[f"no room in {case}"] == (OUT_OF_MEMORY, True)
        assert found["no room for a model"] == (OUT_OF_MEMORY, False)
        assert found["no room for a copy"] == OUT_OF_MEMORY
        for case, says in (("nan", "UserError: the gradient norm is nan"), ("overflow", "UserError: worker ")):
            error, cleared = found[case]
            assert error.startswith(says)  # whichever has the part that would not stay finite
            assert cleared
        assert "the update is not finite" in found["overflow"][0]
        assert_near(found["unchanged"][1], found["unchanged"][0], 0)


def test_a_first_step_without_memory_on_one_leaves_all_without_moments(processes: Processes) -> None:
    """A save that found them on some workers alone would let these wait for the others."""
    directory, found = processes("test_divided", 2)
    assert load_file(directory / "saved at first" / "optimizer.safetensors") == {}
    assert len({of_process["first step"] for of_process in found}) == 1
    norm, moments = found[0]["first step"]
    assert norm > 0
    assert moments > 0


def test_what_is_refused_lets_nobody_wait(processes: Processes) -> None:
    """By name, and workers that were told of different passes end."""
    for rank, found in enumerate(processes("test_divided", 2)[1]):
        missing = "model nobody is not loaded; create it anew"
        assert found["unknown"]["failures"] == ({0: missing, 1: missing} if rank == 0 else {})
        for case in ("no such model to copy", "no such model to sample"):
            assert found[case].startswith("NotFoundError: model nobody is not loaded")
        assert "train_mlp=False and lora_config.rank=0: a server with --shard weights trains whole layers" in found["train_mlp"]
        assert "train_attn=False and lora_config.rank=0" in found["train_attn"]
        assert "it takes no --full-state compact; serve with --full-state float32, or with --shard none" in found["compact"]
        assert "save them with save_weights_for_sampler" in found["snapshot"]
        assert found["forward"]["failures"] == {}
        assert all(isinstance(loss, float) for loss in found["forward"]["losses"])
        assert found["forward"]["gradients"] == found["unknown"]["gradients"] == {name: {} for name in SHAPES}
        assert found["no gradients"] == {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}
        assert found["another pass"].startswith("the workers are not the same any more: the pass that comes next is [")


@pytest.mark.parametrize("count", [2, *slow(3)])  # three differ in uneven parts, of which losses, weights and files are above or below
def test_a_snapshot_has_the_weights_of_its_time(processes: Processes, count: int) -> None:
    """On the first worker alone, to the last bit: those of all workers, of one step, also after others.

    One that fails on a worker lets nobody wait, nor does a model that could not be sampled: nobody creates it.
    """
    _, (first, *others) = processes("test_divided", count)
    for name in ("first snapshot", "later snapshot"):
        assert all(of_process[name] == {model: ("", {}) for model in SHAPES} for of_process in others)
        for model in SHAPES:
            precision, tensors = first[name][model]
            assert precision == "torch.float32"
            assert_near(tensors, first[f"{name} of"][model], 0)
    for model in FULL:
        taken = first["first snapshot"][model][1]
        assert_near(first["first snapshot, read again"][model], taken, 0)
        assert any(not torch.equal(tensor, first["later snapshot"][model][1][name]) for name, tensor in taken.items())
    for found in (first, *others):
        assert found["no room for a snapshot"] == f"TinsmithError: worker 0 of {count}: out of memory"
        assert found["cannot be sampled"] == f"UserError: worker 0 of {count}: vLLM has no such adapters"


def test_a_snapshot_in_half_precision_is_what_passes_read(processes: Processes) -> None:
    _, (first, _) = processes("test_divided", 2)
    precision, tensors = first["snapshot in bfloat16"]
    assert precision == "torch.bfloat16"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_near(tensors, {name: master.to(torch.bfloat16) for name, master in first["snapshot in bfloat16 of"].items()}, 0)


@pytest.mark.parametrize("count", [2, *slow(3)])  # three differ in uneven parts, of which losses, weights and files are above or below
def test_checkpoints_go_on_whatever_the_number_of_workers(processes: Processes, bases: Path, count: int) -> None:
    """From one worker to several, a step there, and back with moments and all."""
    directory, found = processes("test_divided", count)
    backend = backend_of(bases / "text")
    for name in SAVED:
        backend.restore(name, read_state(directory / f"{name} alone", backend.base, optimizer=True))
    restored = weights(backend, *SAVED)
    for rank in range(count):
        backend.run_pass(share_of(work_of(backend.base, 1), 0, rank, count), backward=True)
    for name in SAVED:
        backend.optim_step(name, SETTINGS)
        for of_process in found:
            assert_near(of_process["restored"][name], restored[name], 0)
            assert_near(of_process["went on"][name], weights(backend, name)[name], WITHIN)
        expected = backend.copy_state(name, optimizer=True)
        saved = read_state(directory / f"{name} together", backend.base, optimizer=True)
        assert expected.moments
        assert saved.moments
        assert_near(saved.tensors, expected.tensors, WITHIN)
        assert_near({key: saved.moments[key] for key in expected.moments}, expected.moments, 5 * WITHIN)  # some are squares
        backend.restore(name, saved)
        assert_near(weights(backend, name)[name], found[0]["went on"][name], 0)


@pytest.mark.parametrize("count", [2, 3])
def test_the_files_are_those_of_one_worker_byte_for_byte(processes: Processes, count: int) -> None:
    """Also if all take a step while they write, and whether they are said to be on one host or on several.

    Each writes its part alone: that of one worker is as large as that of another, but for what is written once.
    """
    directory, found = processes("test_divided", count)
    backend = LocalBackend(load(directory / "bases" / "text", device="cpu"), TRAINING)
    assert contents(directory / "all again") == contents(directory / "all alone")
    for name, optimizer in (("all together", True), ("weights alone", False), ("saved at first", True)):
        backend.restore("one", read_state(directory / name, backend.base, optimizer))
        write_state(backend.copy_state("one", optimizer), directory / f"{name} of one")
        assert contents(directory / name) == contents(directory / f"{name} of one")
    assert contents(directory / "weights alone").keys() == {"adapter.safetensors", "checkpoint.json"}
    for name in ("all again", "all together", "weights alone"):
        parts = [of_process[f"{name} bytes"] for of_process in found]
        whole = parts[0][1]
        assert sum(own for own, _ in parts) == whole
        slack = 30_000  # headers, and the numbers that fill up the rows of the last worker
        assert all(abs(own - whole / count) < slack for own, _ in parts), parts


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


if __name__ == "__main__":
    main()
