"""The training half of the engine with a real worker: order, budgets, failures.

Invariant: Commands run in order and once; failures leave no partial gradients behind.
"""

import time
from pathlib import Path

import orjson
import pytest

from tests.engine.here import Here
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.models.base import BaseModel
from tinsmith.observing.metrics import ENGINE
from tinsmith.protocol.serving import EndSession
from tinsmith.store.records import REJECTED, Command

BUDGET = 64
"""Tokens of a pass."""


@pytest.fixture
def here(text_base: BaseModel, tmp_path: Path) -> Here:
    return Here(
        {"tiny": text_base},
        tmp_path,
        models=ModelsConfig(max_lora_rank=64),
        training=TrainingConfig(tokens_per_pass=BUDGET),
    )


@pytest.fixture
def impatient(here: Here) -> Here:
    """Waits for no operation that is missing, once it has looked for it. The model `a` is ready."""
    here.engine.scheduler.held_s = 0.0
    here.create("a")
    here.settle()
    return here


def test_operations_run_in_order_and_once(here: Here) -> None:
    here.create("a")
    here.optim("a", 3)
    here.forward("a", 2, [5])
    here.settle()
    assert here.told == ["s:train:a/0"]
    here.forward("a", 1, [4])
    here.settle()
    assert here.told == [f"s:train:a/{seq}" for seq in range(4)]
    assert [here.error("a", seq) for seq in range(4)] == [None] * 4
    assert here.process.computed == [(["s:train:a", "s:train:a"], 9, True)]


def test_neighbouring_work_of_all_models_shares_passes_and_a_step_is_a_barrier_for_its_own(here: Here) -> None:
    for model in "ab":
        here.create(model)
        here.forward(model, 1, [3])
    here.optim("a", 2)
    here.forward("a", 3, [2])
    here.forward("b", 2, [2])
    here.settle()
    a, b = "s:train:a", "s:train:b"
    assert here.process.computed == [([a, b, b], 8, True), ([a], 2, True)]


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [({"a": [30] * 5, "b": [10]}, [("ab", 40), ("aa", 60), ("aa", 60)]), ({"a": [100, 4]}, [("a", 100), ("a", 4)])],
    ids=["fair", "one over the budget runs alone"],
)
def test_a_pass_keeps_its_budget_and_is_fair(
    here: Here, lengths: dict[str, list[int]], computed: list[tuple[str, int]]
) -> None:
    for model, of_datums in lengths.items():
        here.create(model)
        here.forward(model, 1, of_datums)
    here.settle()
    assert [("".join(model[-1] for model in models), tokens) for models, tokens, _ in here.process.computed] == computed


def test_base_models_take_turns(text_base: BaseModel, tmp_path: Path) -> None:
    """A long operation on one holds up no short one on another, and neither do newer ones behind it."""
    here = Here({"tiny": text_base, "other": text_base}, tmp_path, training=TrainingConfig(tokens_per_pass=BUDGET))
    for model in "ab":
        here.create(model)
    here.create("short", base_model="other")
    here.settle()
    here.process.is_stuck = True
    for model in "ab":
        here.forward(model, 1, [30] * 8)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.forward("short", 1, [10, 60])
    here.until(lambda: len(here.engine.scheduler.forward.operations) == 3)
    here.process.is_stuck = False
    here.settle()
    computed = [models[0] for models, _, _ in here.process.computed]
    assert [place for place, model in enumerate(computed) if model == "s:train:short"] in ([1, 3], [2, 4])
    for name in ("a", "b", "short"):
        assert here.error(name, 1) is None
    assert here.engine.scheduler.forward.order.served.keys() == {"s:train:a", "s:train:b", "s:train:short"}


def test_nothing_is_remembered_of_models_that_are_unloaded_but_their_tokens(here: Here) -> None:
    def trained() -> float:
        return ENGINE.get_sample_value("tinsmith_trained_tokens_total", {"base_model": "tiny"}) or 0.0

    before = trained()
    here.create("a")
    here.forward("a", 1, [5, 4])
    here.settle()
    scheduler = here.engine.scheduler
    assert (trained() - before, scheduler.models["s:train:a"].trained_tokens) == (9, 9)
    here.say(EndSession("s", save=False))
    here.settle()
    assert (scheduler.forward.order.served, scheduler.models) == ({}, {})
    assert trained() - before == 9


def metrics(here: Here, model: str, seq: int) -> dict[str, float]:
    """What a step says of itself."""
    assert here.error(model, seq) is None
    found: dict[str, float] = orjson.loads(here.outcome(model, seq).result or b"")["metrics"]
    return found


def test_a_step_without_gradients_says_so_and_is_obeyed(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    for model in "ab":
        here.create(model)
    here.forward("a", 1, [4], forward_only=True)
    here.optim("a", 2)
    here.forward("a", 3, [4])
    here.optim("a", 4)
    here.optim("a", 5)
    here.optim("b", 1)
    here.settle()
    for model, seq, without in (("a", 2, 1), ("a", 4, None), ("a", 5, 1), ("b", 1, 1)):
        told = metrics(here, model, seq)
        assert (told.get("without_gradients"), told["grad_norm"] == 0) == (without, without == 1)
    warned = [record.getMessage().partition(" is an optim_step without gradients")[0] for record in caplog.records]
    assert sorted(warned) == ["s:train:a/2", "s:train:b/1"]


def ask(here: Here, seq: int, what: str) -> None:
    """An operation of `a` that is right, or wrong in some way."""
    match what:
        case "step" | "wrong step":
            here.optim("a", seq, learning_rate=1e-3 if what == "step" else -1.0)
        case "rejected":
            here.add("a", seq, REJECTED, b"the body is too large")
        case _:
            here.forward("a", seq, [4], forward_only="forward" in what, target=5000 if "wrong" in what else 1)


WRONG = "datum 0: target_tokens at position 0 is 5000, which is not in the vocabulary of 2048"
REFUSED = "the step was refused and the gradients are cleared, because an operation before it failed: seq_id "


@pytest.mark.parametrize(
    "operations",
    [
        [("gradients", None), ("wrong gradients", WRONG), ("step", REFUSED + "2"), ("gradients", None), ("step", None)],
        [("gradients", None), ("wrong forward", WRONG), ("step", None)],
        [("gradients", None), ("wrong step", "learning_rate")],
        [("wrong gradients", WRONG), ("wrong step", "learning_rate"), ("gradients", None), ("step", None)],
        [("rejected", "the body is too large"), ("step", REFUSED + "1: the body is too large")],
    ],
)
def test_a_step_is_refused_with_its_gradients_if_one_of_its_operations_failed_and_the_next_is_its_own(
    here: Here, operations: list[tuple[str, str | None]]
) -> None:
    """What computes no gradients spoils none. A rejected operation keeps its place."""
    here.create("a")
    for seq, (what, _) in enumerate(operations, 1):
        ask(here, seq, what)
    here.settle()
    for seq, (_, error) in enumerate(operations, 1):
        found = here.error("a", seq)
        assert found is None if error is None else error in str(found)
    optimizer = here.backend().optimizers["s:train:a"]
    assert optimizer.accumulator.gradients is None
    taken = [value.item() for name, value in optimizer.moments().items() if name.endswith(".step")]
    assert {*taken} == ({1} if ("step", None) in operations else set())


def test_an_overdue_step_waits_for_what_is_before_the_gap_and_clears_all_of_it(impatient: Here) -> None:
    impatient.process.is_stuck = True
    impatient.forward("a", 1, [60] * 4)  # more passes than the worker gets at a time
    impatient.optim("a", 3)
    impatient.until(lambda: impatient.process.passes)
    impatient.turn()
    assert impatient.engine.patience() > 0
    impatient.process.is_stuck = False
    impatient.until(lambda: "s:train:a/3" in impatient.told)
    impatient.optim("a", 4)
    impatient.settle()
    assert impatient.error("a", 1) is None
    assert str(impatient.error("a", 3)).startswith("seq_id 2 never came")
    impatient.forward("a", 5, [4])
    impatient.optim("a", 6)
    impatient.settle()
    assert [metrics(impatient, "a", seq)["grad_norm"] > 0 for seq in (4, 6)] == [False, True]


def test_a_gap_fails_the_operation_behind_it_and_the_step_and_what_comes_too_late_harms_no_other(
    impatient: Here,
) -> None:
    impatient.forward("a", 2, [4])
    impatient.optim("a", 3)
    impatient.until(lambda: "s:train:a/3" in impatient.told)
    assert impatient.error("a", 2) == "seq_id 1 never came; this operation, seq_id 2, waited 0 s for it"
    assert "the step was refused" in str(impatient.error("a", 3))
    impatient.forward("a", 4, [4])
    impatient.settle()
    impatient.optim("a", 1)
    impatient.optim("a", 5)
    impatient.settle()
    assert "came after the operations behind it had been given up" in str(impatient.error("a", 1))
    assert metrics(impatient, "a", 5)["grad_norm"] > 0


def test_a_long_datum_is_not_overtaken_for_ever(here: Here) -> None:
    for model in ("short", "long"):
        here.create(model)
    here.settle()
    for seq in (1, 2):
        here.forward("short", seq, [30, 30])
    here.until(lambda: here.process.passes)
    here.forward("long", 1, [64])
    for seq in (3, 4, 5):
        here.forward("short", seq, [30, 30])
    here.settle()
    assert [models for models, _, _ in here.process.computed].index(["s:train:long"]) == 2


def test_a_finished_session_cancels_what_it_has_queued_and_frees_its_models(here: Here) -> None:
    for model in "abc":
        here.create(model)
    here.settle()
    here.process.is_stuck = True
    for model in "abc":
        here.forward(model, 1, [60, 60])
    here.until(lambda: here.process.passes)
    here.forward("a", 2, [3])
    here.optim("a", 3)
    here.forward("a", 5, [3])
    here.say(EndSession("s", save=False))
    here.turn()
    here.process.is_stuck = False
    here.settle()
    for model, seq in (("a", 1), ("b", 1), ("c", 1), ("a", 2), ("a", 3), ("a", 5)):
        assert here.error(model, seq) == "it was cancelled: its session ended before the operation was run"
    assert len(here.process.computed) == len(here.process.passes)
    assert here.backend().optimizers == {}
    assert here.engine.scheduler.models == {}


def test_a_session_that_ends_before_its_models_exist_leaves_nothing(here: Here) -> None:
    here.create("a")
    here.create("refused", rank=100)
    here.snapshot("a", 1)
    here.say(EndSession("s", save=False))
    here.settle()
    assert sorted(here.told) == ["s:train:a/0", "s:train:a/1", "s:train:refused/0"]
    assert all("cancelled" in str(here.error(model, seq)) for model, seq in (("a", 0), ("a", 1), ("refused", 0)))
    assert here.backend().optimizers == {}
    assert here.engine.scheduler.models == {}
    assert here.worker.snapshots.held == {}


# ---- The queue: commands run by seq_id whatever order they come in, and a gap is given up after a while


def command(seq_id: int) -> Command:
    return Command(seq_id, "m", seq_id, "forward_backward", 0, 0.0)


def taken(queue: CommandQueue) -> list[int]:
    """Take all that is ready."""
    found = []
    while queue.head() is not None:
        found.append(queue.take().seq_id)
    return found


def test_a_gap_is_given_up_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the clock is set meanwhile: what counts is monotonic time."""
    now, clock = 100.0, 1e9
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: clock)
    queue = CommandQueue()
    for seq_id in (3, 0):
        assert queue.add(command(seq_id))
    assert (taken(queue), queue.head()) == ([0], None)
    now, clock = 104.0, 1e9 - 3600
    queue.add(command(4))
    assert (queue.waiting_since(), queue.overdue(before=99.9)) == (100.0, [])
    ((overdue, missing),) = queue.overdue(before=100.1)
    assert (overdue.seq_id, missing) == (3, 1)
    assert (taken(queue), queue.waiting_since()) == ([4], None)
    assert not queue.add(command(1))
