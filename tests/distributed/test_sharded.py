"""Processes that divide the weights of models, or are replicas, train as one; each keeps its part alone.

Invariant: Workers that divide the weights train what one trains, each keeps its part alone, and one that has nothing or
fails lets no other wait. Also: `tests/distributed/test_replicas.py`.

Invariant: Workers that share all weights write the files of one worker, byte for byte, each its part; when one cannot
write, or dies, there is no checkpoint and nothing is left of it. Also: `tests/distributed/test_sharded_checkpoints.py`,
`tests/worker/test_joint_saves.py`, `tests/store/test_pieces.py`, `tests/training/test_checkpoint.py`,
`tests/engine/test_worker_group.py`.

Invariant: All weights, sharded, train as on one worker; an attempt that fails on one alone counts no gradient twice and
loses none; what one lacks memory for is refused on all. Also: `tests/distributed/test_replicas.py`.

Invariant: A snapshot of sharded weights is of one step, to the last bit, and stays; one that fails on a worker is
refused on all. Also: `tests/engine/test_worker_group.py`.
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import datum, image_chunks, on_host, random_tokens, renderer
from tests.distributed.devices import EXACT, EXACT_IN_HALF, ON_GPUS, here
from tests.distributed.members import Member, in_processes
from tests.extent import EVERYTHING, amount, slow
from tests.training.test_replay import random_routes
from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, NotFoundError, TinsmithError, UserError
from tinsmith.memory.budget import sharded_full_bytes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import AdamSettings, LoraShape, WeightsRef
from tinsmith.store.pieces import FilePiece, check_pieces, write_pieces
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.paged_state import StatePager
from tinsmith.training.parallel.checkpoint_shard import CheckpointShard
from tinsmith.training.parallel.sharded_backend import ShardedBackend
from tinsmith.training.parallel.sharded_layers import ShardedDecoder, shard
from tinsmith.training.parallel.sharded_optimizer import ShardedOptimizer
from tinsmith.training.parallel.sharded_weights import gathered
from tinsmith.wire.chunks import Chunk

T = TypeVar("T")
B = TypeVar("B", bound=LocalBackend)

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
"""Which worker computes each datum of a step, modulo the number of workers; at the second step worker 1 has all."""
STEPS = amount(3, len(OWNERS))
"""The moments matter from the second step on. Those that are left out have other shares of the same kinds."""
IMAGES = [{4: (320, 64), 5: (384, 64), 6: (64, 64), 7: (128, 64)}] * len(OWNERS)
IMAGES[2] = {1: (64, 64), 2: (96, 64), 3: (448, 448), 4: (64, 96)}
"""Which datums of a step have images, and of which width and height, if the base takes them.

At step 2 one worker has several small ones and another one of 196 tokens; the last of three workers has text alone.
"""
FAULTS = {
    "forward": ("base", "layer", 2),
    "backward": ("base", "layer", 3),
    "forward of all weights": ("all", "layer", 2),
    "backward of all weights": ("all", "layer_to_train", 2),
    "sum of all weights": ("all", "give", 2),
}
"""Whose layers fail on worker 1 alone, in which method, at which call; call 3 of two layers begins the backward."""


def work_of(base: BaseModel, step: int) -> list[DatumWork]:
    """Datums of all models in turns: texts, and images if the base takes them; some follow experts if it has any."""
    make = renderer(base)
    inputs: list[list[Chunk]] = [[random_tokens(10 * step + i, 9 + 5 * i)] for i in range(len(OWNERS[0]))]
    if base.family.takes_images:
        for i, (width, height) in IMAGES[step].items():
            inputs[i] = image_chunks(base, 10 * step + i, 8, width=width, height=height)
    rendered = [make.render(chunks) for chunks in inputs]
    for i, own in enumerate(rendered):
        if base.layout.experts and i % 2:
            rendered[i] = replace(own, routes=random_routes(base, len(own), i))
    return [datum(tuple(SHAPES)[i % len(SHAPES)], own, seed=i) for i, own in enumerate(rendered)]


def share_of(work: Sequence[T], step: int, rank: int, count: int) -> list[T]:
    """What a worker computes of a step."""
    return [each for each, owner in zip(work, OWNERS[step], strict=True) if owner % count == rank]


def whole(backend: LocalBackend, name: str, parts: Callable[[Any], Sequence[Tensor]]) -> dict[str, Tensor]:
    """Tensors laid out like a model's masters, by parameter name; all workers put them together if sharded."""
    model = backend.optimizers[name]
    if not isinstance(model, ShardedOptimizer):
        return {
            key: tensor.detach().to("cpu", copy=True)
            for key, tensor in zip(model.weights.named_tensors(), parts(model), strict=True)
        }
    found = {
        key: torch.full(shape, torch.nan) for row in model.sharded.rows.values() for key, shape in row.shapes.items()
    }
    gathered(model.sharded, dict(zip(model.sharded.rows, parts(model), strict=True)), found)
    return found


def gradients(backend: LocalBackend) -> dict[str, dict[str, Tensor]]:
    """What all models have accumulated; nothing where there is nothing."""
    some = {name: bool(backend.optimizers[name].accumulator.gradients) for name in SHAPES}
    return {
        name: whole(backend, name, lambda model: model.accumulator.gradients) if some[name] else {} for name in SHAPES
    }


def weights(backend: LocalBackend, *models: str) -> dict[str, dict[str, Tensor]]:
    """The masters of these models, or of all."""
    return {name: whole(backend, name, lambda model: model.weights.tensors()) for name in models or SHAPES}


def clear(backend: LocalBackend) -> None:
    """Forget all gradients."""
    for name in SHAPES:
        backend.clear_gradients(name)


def step_all(backend: LocalBackend, *models: str) -> dict[str, float]:
    """Step these models, or all; the norms of their gradients."""
    return {name: backend.optim_step(name, SETTINGS)["grad_norm"] for name in models or SHAPES}


def losses_of(backend: LocalBackend, work: Sequence[DatumWork], backward: bool = True) -> list[float | None]:
    """Run a pass that must succeed."""
    outcome = backend.run_pass(work, backward)
    assert outcome.failures == {}
    return [None if result is None else result.loss for result in outcome.results]


def compute_share(backend: LocalBackend, step: int, rank: int, count: int) -> list[float | None]:
    """A share in two passes, so that gradients are added up; the losses."""
    mine = share_of(work_of(backend.base, step), step, rank, count)
    return losses_of(backend, mine[:1]) + losses_of(backend, mine[1:])


def with_models(backend: B) -> B:
    """The backend with the models of SHAPES."""
    for name, shape in SHAPES.items():
        backend.create_model(name, shape)
    return backend


def alone(member: Member, name: str = "text", dtype: str = "float32") -> LocalBackend:
    """A worker that has all weights of all models."""
    return with_models(LocalBackend(member.base(name, dtype=dtype), TRAINING))


def together(member: Member, name: str = "text", dtype: str = "float32", steps: int = 0) -> ShardedBackend:
    """A worker that has a part of the layers of all models, after so many steps of all."""
    base = on_host(member.directory / "bases" / name, dtype, str(here()))
    shard(base, member.group)
    backend = with_models(ShardedBackend(base, TRAINING, member.group))
    for step in range(steps):
        compute_share(backend, step, member.rank, member.count)
        step_all(backend)
    return backend


@cache
def stepped(member: Member) -> ShardedBackend:
    """The text model after a step, for tests that leave it as it was."""
    return together(member, steps=1)


def own_share(member: Member, backend: LocalBackend, step: int = 0) -> list[DatumWork]:
    """What this worker computes of a step."""
    return share_of(work_of(backend.base, step), step, member.rank, member.count)


def held_bytes() -> int:
    """Bytes of all tensors that this process can reach, each memory counted once."""
    gc.collect()
    storages = [
        found.untyped_storage()
        for found in gc.get_objects()
        if type(found) in (Tensor, torch.nn.Parameter) and not found.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def failing(of: Any, method: str, fault: Exception, there: bool, calls: int = 0) -> Iterator[None]:
    """Let a method fail `there`: the call of that number, or each."""
    own, left = getattr(of, method), calls

    def fails(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if there and (left == 0 or calls == 0):
            raise fault
        return own(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, method, fails)
        yield


def without_memory(member: Member, of: Any, method: str, rank: int = 1) -> Any:
    """Let a method find no memory on one worker."""
    return failing(of, method, torch.OutOfMemoryError("out of memory"), member.rank == rank)


def write(
    member: Member,
    backend: ShardedBackend,
    model: str,
    name: str,
    optimizer: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Write this worker's part of a checkpoint, all but its beginning after something else was done meanwhile.

    Nothing is missing. Each writes its part alone: that of one worker is as large as that of another, but for what is
    written once.
    """
    part = backend.copy_part(model, optimizer)
    assert part is not None
    done = Event()

    def pieces(part: CheckpointShard) -> Iterator[FilePiece]:
        for piece in part.pieces():
            yield piece
            done.wait()

    with ThreadPoolExecutor(1) as beside:
        written = beside.submit(
            write_pieces, member.directory / name, pieces(part), between_hosts=name == "all together"
        )
        try:
            meanwhile()
        finally:
            done.set()
    told = [tuple(piece) for text in member.group.texts(json.dumps(written.result())) for piece in json.loads(text)]
    check_pieces(member.directory / name, told)
    own, all_bytes = (sum(size for _, _, size, _ in pieces) for pieces in (written.result(), told))
    slack = 30_000  # headers, and the numbers that fill up the rows of the last worker
    assert abs(own - all_bytes / member.count) < slack


def contents(directory: Path) -> dict[str, Any]:
    """The files of a directory: bytes, or all tensors with their bytes."""
    return {
        file.name: {name: (each.shape, each.numpy().tobytes()) for name, each in sorted(load_file(file).items())}
        if file.suffix == ".safetensors"
        else file.read_bytes()
        for file in directory.iterdir()
    }


def assert_files_of_one_worker(member: Member, name: str, optimizer: bool) -> None:
    """A worker that reads this checkpoint of all weights writes the same files, bit for bit."""
    backend = LocalBackend(member.base("text", device="cpu"), TRAINING)
    backend.restore("one", read_state(member.directory / name, backend.base, optimizer))
    again = member.directory / f"{name} of one, {member.rank}"
    write_state(backend.copy_state("one", optimizer), again)
    assert contents(member.directory / name) == contents(again)


WITHIN = 1e-5
"""Of the largest number of a tensor: gradients are added up in another order."""
HYBRID_WITHIN = 5e-3 if ON_GPUS else 1e-4
"""Delta nets hand on from token to token what is rounded otherwise; on a GPU that differs with every run."""


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        apart, largest = float((found[name].cpu() - tensor.cpu()).abs().max()), float(tensor.abs().max())
        assert apart <= within * largest, f"{name} is {apart:.3g} apart, its largest number is {largest:.3g}"


def summed(of_workers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of all workers together; those without a share have none."""
    there = [each for each in of_workers if each]
    return {name: torch.stack([each[name] for each in there]).sum(0) for name in there[0]}


def refused(act: Callable[[], object], error: type[Exception], says: str) -> None:
    """Something is refused with an error of this very class."""
    with pytest.raises(error, match=f"^{says}") as raised:
        act()
    assert raised.type is error


OUT_OF_MEMORY = "worker 1 of 2: out of memory"


@in_processes(2)
def test_quantized_experts_are_divided_as_they_are_held(member: Member) -> None:
    """Each keeps its part of the codes, and trains as one that has all of them; to the last bit, as nothing is summed.

    All weights are refused, on all workers.
    """
    directory = member.directory / "bases" / "hybrid experts"
    base, ordinary = (on_host(directory, device=str(here()), expert_dtype=held) for held in ("nf4", "model"))
    kept = []
    for each in (base, ordinary):
        shard(each, member.group)
        assert isinstance(each.decoder, ShardedDecoder)
        kept.append(sum(len(part) for part in each.decoder.sharded.parts))
    experts = sum(kind.parameters(64) for kind in base.layout.experts.values())
    saved = experts * 4 - experts * (4 / 8 + 4 / 64)  # codes of 4 bits, and scales in float32
    assert kept[1] - kept[0] == pytest.approx(saved / member.count, rel=0.02)
    undivided = LocalBackend(member.base("hybrid experts", expert_dtype="nf4"), TRAINING)
    backends = [ShardedBackend(base, TRAINING, member.group), undivided]
    work = [each for each in work_of(base, 0) if each.model_id in LORA]
    mine = work[member.rank :: member.count]
    for backend in backends:
        for name in LORA:
            backend.create_model(name, SHAPES[name])
            weights = backend.optimizers[name].weights
            for master in weights.tensors():
                drawn = torch.randn(master.shape, generator=torch.Generator().manual_seed(0))
                master.add_(drawn.to(master.device), alpha=0.05)
            weights.refresh()
    assert losses_of(backends[0], mine) == pytest.approx(losses_of(backends[1], mine), rel=EXACT, abs=0)
    for name in {each.model_id for each in mine}:
        found, expected = (whole(backend, name, lambda model: model.accumulator.gradients) for backend in backends)
        assert_near(found, expected, HYBRID_WITHIN if ON_GPUS else 0.0)
        assert all(gradient.any() for gradient in found.values())
    says = "worker 0 of 2: tiny has no full parameters"
    refused(lambda: backends[0].create_model("all", SHAPES["all"]), UserError, says)


@in_processes(2, 3)
def test_each_keeps_its_part_alone(member: Member) -> None:
    """Of 8 layers: what is freed is what the others keep, but for two buffers of the size of a layer.

    And of a model's masters and moments; what lies around the layers is whole as well. It is no more than what was to
    be taken.
    """
    base, count = member.base("deep"), member.count
    sizes = [
        sum(parameter.numel() for parameter in base.language_model.layers[index].parameters()) for index in range(8)
    ]
    around = sum(parameter.numel() for parameter in base.full_targets(SHAPES["all"]).values()) - sum(sizes)
    needed = sharded_full_bytes(sizes, around, torch.float32, count)
    undivided = held_bytes()
    shard(base, member.group)
    assert isinstance(base.decoder, ShardedDecoder)
    layers, before = base.decoder.sharded, held_bytes()
    slack = 8 * 32 * 64 * count  # tensors begin at multiples of 64 bytes, and parts are of one size
    undivided_bytes, kept, buffers = 4 * sum(sizes), sum(map(len, layers.parts)), sum(map(len, layers.buffers))
    assert undivided_bytes / count <= kept <= undivided_bytes / count + slack
    assert undivided_bytes / 4 <= buffers <= undivided_bytes / 4 + slack
    assert abs(undivided - before - (undivided_bytes - kept - buffers)) <= slack

    backend = ShardedBackend(base, TRAINING, member.group)
    backend.create_model("all", SHAPES["all"])
    model = backend.optimizers["all"]
    held, told, promised, parameters = (
        held_bytes() - before,
        model.weights.nbytes,
        model.unclaimed,
        model.weights.parameter_count,
    )
    slack = 4 * 64 * count * 12  # rows end at multiples of 64 numbers for each worker
    assert parameters == sum(sizes) + around
    expected = 4 * (parameters / count + around + max(sizes))  # masters, whole tensors, the buffer of sums
    assert expected <= told <= expected + slack
    assert told <= held <= told + slack
    assert 0 <= needed.device - told - promised <= slack
    backend.run_pass([datum("all", renderer(base).render([random_tokens(1, 9)]))] * (member.rank == 0), backward=True)
    backend.optim_step("all", SETTINGS)
    assert abs(held_bytes() - before - held - needed.moments) <= slack


TRAINED = {
    2: [
        ("text", "float32", True),
        ("text", "bfloat16", True),
        ("image", "float32", True),
        ("hybrid", "float32", True),
        ("experts", "float32", True),
        ("hybrid experts", "float32", True),
        ("sinks", "float32", True),
        *[("experts", "float32", False)] * EVERYTHING,  # these are in test_replicas.py
        ("image", "float32", False),
        *[("text", "float32", False)] * EVERYTHING,  # replicas of a text model are in test_all_reduce.py
    ],
    # Shares and parts are uneven
    3: [("text", "float32", True), *[("image", "float32", True), ("text", "float32", False)] * EVERYTHING],
}
"""What so many processes train: the base and its precision, and whether they divide its layers or are replicas."""


@in_processes(2, 3)
def test_losses_gradients_and_weights_are_those_of_one_worker(member: Member) -> None:
    """Of several models in shared passes, also where one worker computes a whole step or has one far larger image.

    A share has the gradients of LoRA that a worker with all weights computes, to the last bit on a CPU. Those of all
    weights are added up in float32, whatever the precision.
    """
    for name, dtype, divides in TRAINED[member.count]:
        within = (
            HYBRID_WITHIN if name.startswith("hybrid") else max(WITHIN, EXACT_IN_HALF if dtype == "bfloat16" else 0.0)
        )
        exact = EXACT_IN_HALF if dtype == "bfloat16" else EXACT
        if name == "hybrid experts" or (EXACT and name == "hybrid"):  # of one output a CPU rounds by where weights lie
            exact = HYBRID_WITHIN
        if name == "sinks":  # those of one worker are where they are in the file, at no particular address
            exact = max(exact, within)
        one = alone(member, name, dtype)
        backend: LocalBackend
        if divides:
            backend = together(member, name, dtype)
        else:
            backend = with_models(LocalBackend(member.base(name, dtype=dtype), TRAINING, member.group))
        for step in range(STEPS if name == "image" or EVERYTHING else 2):
            losses = compute_share(backend, step, member.rank, member.count)
            own = gradients(backend)
            assert len(losses) == len(share_of(range(8), step, member.rank, member.count))
            if step == 0:
                assert compute_share(one, 0, member.rank, member.count) == pytest.approx(losses, rel=within)
                for model in LORA:
                    assert_near(own[model], gradients(one)[model], exact)
                clear(one)
            of_all = member.of_all((losses, own, step_all(backend), weights(backend)), everywhere=False)
            if member.rank == 0:
                assert_step_of_one(one, step, of_all, divides, within)


def assert_step_of_one(one: LocalBackend, step: int, of_all: Sequence[Any], divides: bool, within: float) -> None:
    """What all workers have come to in a step is what one comes to that computes the share of each, one after another.

    Rows of other datums in the same pass would round otherwise. Each parameter counts once in the norm.
    """
    expected = [loss for rank in range(len(of_all)) for loss in compute_share(one, step, rank, len(of_all))]
    # Weights of any sign cancel in a loss: its terms are of the size of the largest one.
    largest = max(abs(loss or 0.0) for loss in expected)
    assert [loss for losses, *_ in of_all for loss in losses] == pytest.approx(
        expected, rel=within, abs=within * largest
    )
    expected_gradients, norms, expected_weights = gradients(one), step_all(one), weights(one)
    for model in SHAPES:
        totals = [found[model] for _, found, _, _ in of_all]
        if divides and model in FULL:
            for other in totals[1:]:
                assert_near(other, totals[0])  # they have added them up
            totals = totals[:1]
        total = summed(totals)
        assert_near(total, expected_gradients[model], within)
        # B begins with zeros, so that A has no gradient before the first step. Every parameter has one later.
        there = [bool(gradient.any()) for gradient in total.values()]
        assert sum(there) == (len(there) // 2 if step == 0 and model in LORA else len(there))
        for _, _, its_norms, its_weights in of_all:
            assert its_norms[model] == pytest.approx(norms[model], rel=within)
            assert_near(its_weights[model], expected_weights[model], within)
            assert_near(its_weights[model], of_all[0][3][model])
    take(one, of_all[0][3])


def take(backend: LocalBackend, masters: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Go on with the workers' weights: what they round otherwise than one alone does not grow from step to step."""
    with torch.no_grad():
        for name, tensors in masters.items():
            own = backend.optimizers[name].weights
            for key, tensor in zip(own.named_tensors(), own.tensors(), strict=True):
                tensor.copy_(tensors[key])
            own.refresh()


@in_processes(2, *slow(3))  # three differ in uneven parts, of which losses, weights and files are above or below
def test_what_fails_on_one_alone_counts_nothing_twice_and_loses_nothing(member: Member) -> None:
    """It goes on in halves, as a lone worker does; the others only put the layers together for it.

    Of a model whose weights are sharded all compute the attempt again.
    """
    backend = stepped(member)
    make, model = renderer(backend.base), backend.optimizers["all"]
    assert isinstance(model, ShardedOptimizer)
    mine = own_share(member, backend) + [
        datum("all", make.render([random_tokens(100 * member.rank + i, 11 + i)])) for i in range(2)
    ]
    losses, expected = losses_of(backend, mine), gradients(backend)
    clear(backend)
    for fault in (torch.OutOfMemoryError("out of memory"), ValueError("bad")):
        for where, (of, method, calls) in FAULTS.items():
            with failing(
                backend.passes.layers if of == "base" else model.sharded.layers, method, fault, member.rank == 1, calls
            ):
                assert losses_of(backend, mine) == pytest.approx(losses, rel=WITHIN)
            for name, found in gradients(backend).items():
                assert_near(
                    found, expected[name], EXACT if name in LORA and member.rank != 1 and "all" not in where else WITHIN
                )
            clear(backend)


@in_processes(2)
def test_a_worker_without_memory_lets_nobody_wait(member: Member) -> None:
    """What it has no room for is refused on all workers, and weights stay as they were."""
    backend = stepped(member)
    mine, model, before = own_share(member, backend), backend.optimizers["all"], weights(backend, "all")["all"]
    with without_memory(member, model.accumulator, "begin_pass"):
        failures = backend.run_pass(mine, backward=True).failures
    assert sorted(failures) == [place for place, work in enumerate(mine) if work.model_id == "all"]
    assert gradients(backend)["all"] == {}
    assert gradients(backend)["headless"]  # another model, in the same pass
    clear(backend)

    def step_refused(error: type[TinsmithError], says: str, settings: AdamSettings = SETTINGS) -> None:
        refused(lambda: backend.optim_step("all", settings), error, says)
        assert model.accumulator.totals is None
        clear(backend)

    for lacking in ("claim_moments", "_checked"):
        backend.run_pass(mine, backward=True)
        with without_memory(member, model, lacking):
            step_refused(TinsmithError, OUT_OF_MEMORY)
    backend.run_pass(mine, backward=True)
    for part in (model.accumulator.totals or [])[:1]:
        part[0] = torch.nan if member.rank == 1 else part[0]
    step_refused(UserError, "the gradient norm is nan")
    backend.run_pass(mine, backward=True)
    # Whichever has the part that would not stay finite says so.
    step_refused(UserError, "worker .*the update is not finite", replace(SETTINGS, lr=1e38, eps=0.0))
    with without_memory(member, backend.memory, "require"):
        refused(lambda: backend.create_model("more", SHAPES["all"]), TinsmithError, OUT_OF_MEMORY)
        refused(lambda: backend.copy_part("all", optimizer=True), TinsmithError, OUT_OF_MEMORY)
    assert "more" not in backend.optimizers
    assert_near(weights(backend, "all")["all"], before)


@in_processes(2)
def test_the_adapter_that_was_used_last_makes_way_for_all_weights(member: Member) -> None:
    """Its state leaves the device if there is no room for both."""
    base = on_host(member.directory / "bases" / "text", "float32", str(here()))
    shard(base, member.group)
    backend = ShardedBackend(base, TRAINING, member.group)

    def free(*_: object) -> int:
        return 0 if all(map(backend.memory.pager.is_on_device, backend.optimizers.values())) else 2**40

    backend.memory.pager = StatePager(base.device, host_room=2**30, free=free)
    backend.create_model("four", SHAPES["four"])
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.model_memory", "models.machine"):
            patch.setattr(f"tinsmith.{module}.free_memory", free)
        backend.create_model("all", SHAPES["all"])
    assert not backend.memory.pager.is_on_device(backend.optimizers["four"])


@in_processes(2, 3)
def test_a_first_step_without_memory_on_one_leaves_all_without_moments(member: Member) -> None:
    """A save that found them on some workers alone would let these wait for the others."""
    backend = stepped(member)
    backend.create_model("new", SHAPES["all"])
    model, mine = (
        backend.optimizers["new"],
        [datum("new", renderer(backend.base).render([random_tokens(member.rank, 9)]))],
    )
    backend.run_pass(mine, backward=True)
    with without_memory(member, model, "claim_moments"):
        refused(
            lambda: backend.optim_step("new", SETTINGS), TinsmithError, f"worker 1 of {member.count}: out of memory"
        )
    write(member, backend, "new", "saved at first")
    assert load_file(member.directory / "saved at first" / "optimizer.safetensors") == {}
    assert_files_of_one_worker(member, "saved at first", optimizer=True)
    backend.run_pass(mine, backward=True)
    step = backend.optim_step("new", SETTINGS)["grad_norm"], len(model.moments())
    assert min(step) > 0
    assert set(member.of_all(step)) == {step}
    backend.delete_model("new")


def snapshot(member: Member, backend: ShardedBackend, model: str) -> Weights | None:
    """A snapshot, on the first worker alone; others help."""
    if member.rank > 0:
        backend.help_to_snapshot(model)
        return None
    return backend.snapshot(model, WeightsRef("tiny", model, model, None))


def numbers_of(weights: Weights) -> dict[str, Tensor]:
    """What passes read of a snapshot."""
    return {
        name: tensor.detach().clone() for name, tensor in zip(weights.named_tensors(), weights.leaves(), strict=True)
    }


@in_processes(2, *slow(3))  # as above
def test_a_snapshot_has_the_weights_of_its_time(member: Member) -> None:
    """On worker 0 alone, to the last bit, in the dtype that passes read: all workers' weights at one step, also later.

    One that fails on a worker lets nobody wait, nor does a model that could not be sampled: nobody creates it.
    """
    for dtype in (torch.float32, torch.bfloat16):
        backend, taken = together(member, dtype=str(dtype).removeprefix("torch.")), []
        backend.gives_snapshots = member.rank == 0
        for step in range(2):
            losses_of(backend, own_share(member, backend, step))
            step_all(backend)
            taken.append(({model: snapshot(member, backend, model) for model in SHAPES}, weights(backend)))
        for snapshots, masters in taken:
            for model, copy in snapshots.items():
                assert (copy is None) == (member.rank > 0)
                if copy is not None:
                    assert copy.dtype == dtype
                    assert_near(numbers_of(copy), {name: master.to(dtype) for name, master in masters[model].items()})
        assert all(
            any(not torch.equal(taken[0][1][model][name], later) for name, later in taken[1][1][model].items())
            for model in SHAPES
        )
    with without_memory(member, backend.memory, "require", rank=0):
        refused(lambda: snapshot(member, backend, "all"), TinsmithError, f"worker 0 of {member.count}: out of memory")
    refused(lambda: snapshot(member, backend, "nobody"), NotFoundError, "model nobody is not loaded")
    refusal = UserError("vLLM has no such adapters") if member.rank == 0 else None
    refused(
        lambda: backend.agree_to_create(refusal), UserError, f"worker 0 of {member.count}: vLLM has no such adapters"
    )
    backend.agree_to_create(None)


@in_processes(2, 3)
def test_checkpoints_go_on_whatever_the_number_of_workers(member: Member) -> None:
    """From one worker to several, a step there, and back with moments and all.

    The files are those of one worker, byte for byte, also if all take a step while they write, and whether they are
    said to be on one host or on several.
    """
    place, one, backend = member.directory, alone(member), stepped(member)
    compute_share(one, 0, 0, 1)
    step_all(one)
    if member.rank == 0:
        for name in SAVED:
            write_state(one.copy_state(name, optimizer=True), place / f"{name} alone")
    member.wait()
    for each in (one, backend):
        for name in SAVED:
            each.restore(name, read_state(place / f"{name} alone", each.base, optimizer=True))
    for name, tensors in weights(backend, *SAVED).items():
        assert_near(tensors, weights(one, name)[name])

    def step() -> None:
        losses_of(backend, share_of(work_of(backend.base, 1), 0, member.rank, member.count))
        step_all(backend, *SAVED)

    write(member, backend, "all", "all again", meanwhile=step)
    assert contents(place / "all again") == contents(place / "all alone")
    went_on = weights(backend, *SAVED)
    write(member, backend, "all", "all together")
    assert_files_of_one_worker(member, "all together", optimizer=True)
    write(member, backend, "all", "weights alone", optimizer=False)
    assert_files_of_one_worker(member, "weights alone", optimizer=False)
    assert contents(place / "weights alone").keys() == {"adapter.safetensors", "checkpoint.json"}
    assert backend.copy_part("four", optimizer=True) is None
    if member.rank == 0:
        write_state(backend.copy_state("four", optimizer=True), place / "four together")
    member.wait()
    for rank in range(member.count):
        losses_of(one, share_of(work_of(one.base, 1), 0, rank, member.count))
    step_all(one, *SAVED)
    for name in SAVED:
        assert_near(went_on[name], weights(one, name)[name], WITHIN)
        expected, saved = (
            one.copy_state(name, optimizer=True),
            read_state(place / f"{name} together", one.base, optimizer=True),
        )
        assert_near(saved.tensors, expected.tensors, WITHIN)
        assert expected.moments
        assert saved.moments
        # Some are squares
        assert_near({key: saved.moments[key] for key in expected.moments}, expected.moments, 5 * WITHIN)
        one.restore(name, saved)
        assert_near(weights(one, name)[name], went_on[name])


@in_processes(2)
def test_what_is_refused_lets_nobody_wait(member: Member) -> None:
    """By name, and workers that were told of different passes end. This comes last."""
    backend = stepped(member)
    clear(backend)
    for switch in ("train_mlp", "train_attn"):
        shape = replace(SHAPES["all"], **{switch: False})
        says = f".*{switch}=False and lora_config.rank=0: a server with --shard weights trains whole layers"
        refused(lambda shape=shape: backend.create_model("part", shape), UserError, says)  # type: ignore[misc]
    compact = ShardedBackend(backend.base, replace(TRAINING, full_state="compact"), member.group)
    says = ".*it takes no --full-state compact; serve with --full-state float32, or with --shard none"
    refused(lambda: compact.create_model("compact", SHAPES["all"]), UserError, says)
    refused(
        lambda: backend.snapshot("all", WeightsRef("tiny", "k", "k", None)),
        UserError,
        ".*save them with save_weights_for_sampler",
    )
    missing = "model nobody is not loaded; create it anew"
    refused(lambda: backend.copy_part("nobody", optimizer=True), NotFoundError, missing)
    unknown = [datum("nobody", each.rendered) for each in work_of(backend.base, 0)[:2]] if member.rank == 0 else []
    assert backend.run_pass(unknown, backward=True).failures == dict.fromkeys(range(len(unknown)), missing)
    assert all(isinstance(loss, float) for loss in losses_of(backend, own_share(member, backend), backward=False))
    assert gradients(backend) == {name: {} for name in SHAPES}
    assert backend.optim_step("all", SETTINGS) == {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}
    says = r"the workers are not the same any more: the pass that comes next is \["
    refused(lambda: backend.run_pass([], backward=member.rank == 0), DeviceLostError, says)
