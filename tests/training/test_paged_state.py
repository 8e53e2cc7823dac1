"""LoRA models that do not fit the device together: their state waits in host memory and comes back on use.

Invariant: Models that train in turns with room for fewer than all have every log-probability, gradient, weight, moment
and snapshot of a server with room for all, bit for bit; a move that runs out of memory leaves all as it was. Also:
`tests/acceptance/test_paged_models.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bases import datum, load, new_ref, random_tokens, renderer
from tests.counted_memory import CountedMemory
from tests.extent import amount
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.memory.budget import most_models, paged_out_at_most
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.paged_state import StatePager

STEP = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
SHAPE = LoraShape(4, 0)
NAMES = ("a", "b", "c")


def backend_with_room(base: BaseModel, models: float, names: Sequence[str] = NAMES) -> LocalBackend:
    """A backend whose device has room for so many models of SHAPE, and whose host for all."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=16))
    backend.memory.pager = StatePager(base.device, models * size_of(base), host_room=2**30)
    for seed, name in enumerate(names):
        backend.create_model(name, LoraShape(4, seed))
    return backend


def size_of(base: BaseModel) -> int:
    return LocalBackend(base, TrainingConfig()).memory.lora_bytes(SHAPE).training


def work_of(base: BaseModel, name: str, seed: int) -> DatumWork:
    return datum(name, renderer(base).render([random_tokens(seed, 9 + seed % 5)]), seed)


def on_device(backend: LocalBackend) -> str:
    return "".join(name for name in NAMES if backend.memory.pager.is_on_device(backend.optimizers[name]))


def logprobs(backend: LocalBackend, work: Sequence[DatumWork], backward: bool = True) -> list[np.ndarray]:
    """The log-probabilities of one pass, which does not fail."""
    outcome = backend.run_pass(work, backward)
    assert outcome.failures == {}
    return [result.logprobs for result in outcome.results if result is not None]


def state_of(backend: LocalBackend, name: str) -> dict[str, Tensor]:
    """Masters, working copies, moments and sums of gradients, all as copies."""
    state = backend.copy_state(name, optimizer=True)
    optimizer = backend.optimizers[name]
    assert isinstance(optimizer.weights, Adapter)
    found = {**state.tensors, **(state.moments or {}), "working": optimizer.weights.flat_working.detach()}
    if optimizer.accumulator.totals is not None:
        found["gradients"] = optimizer.accumulator.totals[0]
    return {key: tensor.clone() for key, tensor in found.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


def assert_same(one: LocalBackend, other: LocalBackend, names: Sequence[str] = NAMES) -> None:
    for name in names:
        assert_equal(state_of(one, name), state_of(other, name))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_5", "float32"), ("qwen3_moe", "float32")],
)
def test_models_in_turns_equal_those_of_a_server_with_room_for_all(
    family_dir: Callable[[str], Path], family: str, dtype: str
) -> None:
    """Gradients are open while their model is paged out: there are passes of others before its step."""
    base = load(family_dir(family), dtype=dtype)
    paged, whole = backend_with_room(base, 1.5), backend_with_room(base, 3)
    for turn in range(3):
        for part in range(2):
            for seed, name in enumerate(NAMES):
                work = [work_of(base, name, 10 * turn + 3 * seed + part)]
                for one, other in zip(logprobs(paged, work), logprobs(whole, work), strict=True):
                    np.testing.assert_array_equal(one, other)
                assert on_device(paged) == name
        for name in NAMES[:: -1 if turn else 1]:
            assert_equal(state_of(paged, name), state_of(whole, name))
            assert paged.optim_step(name, STEP) == whole.optim_step(name, STEP)
            assert on_device(paged) == name
    assert_same(paged, whole)
    assert whole.memory.pager.page_outs == 0
    assert paged.memory.pager.page_outs == paged.memory.pager.page_ins + 2 == 2 + 27 - 1


def test_the_least_recently_used_leaves(text_base: BaseModel) -> None:
    backend = backend_with_room(text_base, 2)
    assert on_device(backend) == "bc"
    logprobs(backend, [work_of(text_base, "b", 0)])
    logprobs(backend, [work_of(text_base, "a", 0)])
    assert on_device(backend) == "ab"
    backend.optim_step("b", STEP)
    backend.snapshot("c", new_ref())
    assert on_device(backend) == "bc"
    backend.delete_model("b")
    logprobs(backend, [work_of(text_base, "a", 0)])
    assert backend.memory.pager.facts() | {"milliseconds": 0} == {
        "on_device": 2,
        "in_host_memory": 0,
        "host_bytes": 0,
        "page_ins": 3,
        "page_outs": 3,
        "milliseconds": 0,
    }


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["pass", "pass", "pass", "forward", "step", "save", "load", "snapshot", "clear", "create"]),
        st.sampled_from(NAMES),
        st.integers(0, 20),
    ),
    max_size=12,
)


@settings(max_examples=amount(12, 200), deadline=None)
@given(OPERATIONS, st.sampled_from([1.0, 2.0]))
def test_any_order_of_calls_gives_the_same(
    text_base: BaseModel, tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, int]], room: float
) -> None:
    """Loads put another model's weights and moments in the place of a model that may be paged out."""
    directory = tmp_path_factory.mktemp("saved")
    backends = backend_with_room(text_base, room), backend_with_room(text_base, 3)
    for number, (what, name, seed) in enumerate(operations):
        found = []
        for place, backend in enumerate(backends):
            match what:
                case "pass" | "forward":
                    found.append([logprobs(backend, [work_of(text_base, name, seed)], what == "pass")[0].tolist()])
                case "step":
                    found.append([backend.optim_step(name, STEP)])
                case "save" | "load":
                    saved = directory / f"{number}-{place}"
                    write_state(backend.copy_state(name, optimizer=True), saved)
                    other = NAMES[seed % 3]
                    if what == "load":
                        backend.restore(other, read_state(saved, text_base, optimizer=True))
                    found.append([])
                case "snapshot":
                    found.append([backend.snapshot(name, new_ref()).tensors()[1].tolist()])
                case "clear":
                    backend.clear_gradients(name)
                    found.append([])
                case "create":
                    backend.create_model(name, LoraShape(4, seed))
                    found.append([])
        assert found[0] == found[1]
    assert_same(*backends)


def test_a_pass_of_models_that_do_not_fit_is_cut_into_those_that_do(text_base: BaseModel) -> None:
    """Wherever they are at the moment; each model's data stay together, in order, and a resident one is among them."""
    work = [work_of(text_base, name, seed) for seed, name in enumerate("abcabc")]
    backend = backend_with_room(text_base, 2)
    for used in ("", "a", "c"):
        if used:
            logprobs(backend, [work_of(text_base, used, 1)], backward=False)
        assert backend.passes._rows(work, range(6), backward=True) == [[0, 1, 3, 4], [2, 5]]
    whole = backend_with_room(text_base, 3)
    assert whole.passes._rows(work, range(6), backward=True) == [[0, 1, 2, 3, 4, 5]]
    apart = [logprobs(whole, [work[i] for i in part]) for part in ([0, 1, 3, 4], [2, 5])]
    together = logprobs(backend, work)
    for index, expected in zip([0, 1, 3, 4, 2, 5], [*apart[0], *apart[1]], strict=True):
        np.testing.assert_array_equal(together[index], expected)
    assert on_device(backend) == "bc"
    assert_same(backend, whole)


def test_a_snapshot_stays_as_it_is_while_its_model_is_away(text_base: BaseModel) -> None:
    backend = backend_with_room(text_base, 1)
    logprobs(backend, [work_of(text_base, "a", 1)])
    backend.optim_step("a", STEP)
    frozen = backend.snapshot("a", new_ref())
    assert isinstance(frozen, Adapter)
    before = frozen.flat.clone(), frozen.flat_working.detach().clone()
    for name in "bca":
        logprobs(backend, [work_of(text_base, name, 2)])
        backend.optim_step(name, STEP)
        assert all(torch.equal(*pair) for pair in zip((frozen.flat, frozen.flat_working), before, strict=True))


def test_a_snapshot_of_what_has_not_changed_is_no_second_copy(text_base: BaseModel) -> None:
    """Nor does it bring a model back. A step, a load and a model of the same name make another one."""
    backend = backend_with_room(text_base, 1)
    refs = [new_ref() for _ in range(5)]
    first = backend.snapshot("a", refs[0])
    assert on_device(backend) == "a"
    backend.snapshot("b", new_ref())
    again = backend.snapshot("a", refs[1])
    assert on_device(backend) == "b"
    assert isinstance(first, Adapter)
    assert isinstance(again, Adapter)
    assert again.flat is first.flat
    assert again.flat_working is first.flat_working
    assert (first.ref, again.ref) == (refs[0], refs[1])
    logprobs(backend, [work_of(text_base, "a", 1)])
    backend.optim_step("a", STEP)
    stepped = backend.snapshot("a", refs[2])
    assert_apart(backend, "a", stepped, first)
    backend.restore("a", backend.copy_state("c", optimizer=False))
    loaded = backend.snapshot("a", refs[3])
    assert_apart(backend, "a", loaded, stepped)
    backend.create_model("a", LoraShape(4, 7))
    assert_apart(backend, "a", backend.snapshot("a", refs[4]), loaded)


def assert_apart(backend: LocalBackend, name: str, found: Weights, before: Weights) -> None:
    """It has the numbers of the model, and not those of the snapshot before."""
    now, own, former = (each.tensors() for each in (found, backend.optimizers[name].weights, before))
    assert all(torch.equal(a, b) for a, b in zip(now, own, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(now, former, strict=True))


@pytest.mark.parametrize("number", range(1, 5))
def test_host_memory_that_ends_leaves_all_as_it_was(text_base: BaseModel, number: int) -> None:
    """Of four tensors, whichever has no place: the model stays on the device, and the next one comes beside it."""
    backend, whole = backend_with_room(text_base, 1, "ab"), backend_with_room(text_base, 3, "ab")
    for each in (backend, whole):
        for _ in range(2):
            logprobs(each, [work_of(text_base, "a", 1)])
            each.optim_step("a", STEP)
        logprobs(each, [work_of(text_base, "a", 2)])
    with CountedMemory(fails=number) as counted:
        backend.memory.pager.bring([backend.optimizers["b"]])
    assert counted.fails == 0
    assert all(backend.memory.pager.is_on_device(backend.optimizers[name]) for name in "ab")
    assert_same(backend, whole, "ab")


def test_host_memory_that_others_have_taken_is_not_asked_for(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linux would end the process when it writes there: the model stays on the device until there is room."""
    backend = backend_with_room(text_base, 1, "ab")
    pager, optimizers = backend.memory.pager, [backend.optimizers[name] for name in "ab"]
    size = sum(tensor.nbytes for tensor in pager.models[optimizers[1]].travelling)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.models.machine._memory", lambda: (2**40, size - 1))
        pager.bring(optimizers[:1])
        assert all(map(pager.is_on_device, optimizers))
    assert "host memory ends: a model stays on" in caplog.text
    backend.create_model("c", SHAPE)
    assert on_device(backend) == "c"


@pytest.mark.parametrize("number", range(1, 5))
def test_device_memory_that_ends_leaves_all_as_it_was(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """When the first or any other tensor comes back: the pass is refused in words, and the next one finds all there."""
    backend, whole = backend_with_room(text_base, 1, "ab"), backend_with_room(text_base, 3, "ab")
    for each in (backend, whole):
        logprobs(each, [work_of(text_base, "a", 1)])
        each.optim_step("a", STEP)
        logprobs(each, [work_of(text_base, "a", 2)])
        logprobs(each, [work_of(text_base, "b", 2)])
    resize = torch.UntypedStorage.resize_
    taken: list[int] = []

    def limited(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        taken.extend([size] if size else [])
        if size and len(taken) >= number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        resized: torch.UntypedStorage = resize(storage, size)
        return resized

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", limited)
        outcome = backend.run_pass([work_of(text_base, "a", 3)], backward=True)
        assert outcome.results == [None]
        assert f"needs more memory than {text_base.device} has left" in outcome.failures[0]
        with pytest.raises(torch.OutOfMemoryError):
            backend.snapshot("a", new_ref())
    assert not backend.memory.pager.is_on_device(backend.optimizers["a"])
    assert_same(backend, whole, "ab")
    logprobs(backend, [work_of(text_base, "a", 3)])
    logprobs(whole, [work_of(text_base, "a", 3)])
    assert_same(backend, whole, "ab")


def test_a_step_that_finds_no_room_is_refused_and_clears_its_gradients(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_with_room(text_base, 1, "ab")
    before = state_of(backend, "a")
    logprobs(backend, [work_of(text_base, "a", 1)])
    logprobs(backend, [work_of(text_base, "b", 1)])

    def full(storage: torch.UntypedStorage, size: int) -> None:
        if size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(StatePager, "_page_out", lambda *_: False)
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(TinsmithError, match="the gradients are cleared and the weights stay as they were"):
            backend.optim_step("a", STEP)
    assert_equal(state_of(backend, "a"), before)
    assert backend.optim_step("a", STEP) == {"grad_norm": 0.0, "learning_rate": STEP.lr}


def test_other_models_leave_when_a_pass_runs_out_of_memory(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, whole = backend_with_room(text_base, 3), backend_with_room(text_base, 3)
    run = backend.passes._run

    def with_one(work: Sequence[DatumWork], *others: object) -> object:
        if on_device(backend) != "a":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return run(work, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(backend.passes, "_run", with_one)
    found, expected = (logprobs(each, [work_of(text_base, "a", 1)])[0] for each in (backend, whole))
    np.testing.assert_array_equal(found, expected)
    assert on_device(backend) == "a"
    assert_same(backend, whole)


def test_memory_that_others_take_pages_models_out(text_base: BaseModel) -> None:
    """Snapshots, for example: no more room is used than is free."""
    free = 10 * size_of(text_base)
    backend = LocalBackend(text_base, TrainingConfig(logits_chunk=16))
    backend.memory.pager = StatePager(text_base.device, 10 * size_of(text_base), 2**30, lambda: free)
    for seed, name in enumerate(NAMES):
        backend.create_model(name, LoraShape(4, seed))
    assert on_device(backend) == "abc"
    free = 0
    backend.snapshot("b", new_ref())
    assert on_device(backend) == "b"


def test_a_model_for_which_neither_device_nor_host_has_a_place_is_refused(text_base: BaseModel) -> None:
    size = size_of(text_base)
    backend = LocalBackend(text_base, TrainingConfig(logits_chunk=16))
    backend.memory.pager = StatePager(text_base.device, 2.5 * size, 1.5 * size)
    backend.create_model("a", SHAPE)
    backend.create_model("b", SHAPE)
    backend.create_model("c", SHAPE)
    with pytest.raises(UserError, match=r"3 LoRA models are loaded, and one more of .* GiB has no place: up to"):
        backend.create_model("d", SHAPE)
    assert list(backend.optimizers) == ["a", "b", "c"]
    backend.restore("c", backend.copy_state("a", optimizer=False))  # in the place of one that is there
    backend.delete_model("a")
    backend.create_model("d", SHAPE)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 100), st.data())
def test_no_order_of_use_pages_out_more_than_is_asked_for(sizes: list[int], room: int, data: st.DataObject) -> None:
    """And as many equal models as `most_models` says find their place."""
    there: list[int] = []
    later = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=30))
    for number, used in enumerate([*range(len(sizes)), *later]):
        if used in there:
            there.remove(used)
        while there and sum(sizes[each] for each in there) + sizes[used] > room:
            there.pop(0)
        there.append(used)
        created = sizes[: number + 1]
        assert sum(created) - sum(sizes[each] for each in there) <= paged_out_at_most(created, room)
    most = most_models(sizes[0], room, 100)
    if most:
        assert paged_out_at_most([sizes[0]] * most, room) <= 100 < paged_out_at_most([sizes[0]] * (most + 1), room)
