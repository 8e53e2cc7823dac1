"""The end of an engine with its workers: the next one brings models back as they were, and goes on.

Invariant: Whenever an engine dies, each operation that is recorded is in its model once, and each other one is run once
by the next engine. Also: `tests/acceptance/test_restarts.py`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.here import PLACE, Here
from tests.engine.test_recovery import (
    LENGTHS,
    another,
    assert_same,
    copies,
    flat,
    models,
    publish,
    results,
    state,
    step,
)
from tests.extent import amount
from tinsmith.engine.loop import Stopping
from tinsmith.models.base import BaseModel
from tinsmith.store.histories import MOST_ENDS, MOST_IDLE_STARTS
from tinsmith.store.records import HistoryChange, Outcome


class DiesNow(BaseException):
    """The engine is killed."""


def script(here: Here) -> None:
    """Ask for all that a model can be asked for; steps 1 to 3 take several passes each."""
    here.forward("a", 1, LENGTHS, target=1)
    here.forward("a", 2, [20], target=2)
    here.optim("a", 3, learning_rate=0.1)
    publish(here, 4)
    here.forward("a", 5, LENGTHS, target=5)
    here.save("a", 6, "open")
    here.optim("a", 7, learning_rate=0.1)
    here.add("a", 8, "forward_backward", b"no protobuf")
    here.forward("a", 9, LENGTHS, target=9)
    here.optim("a", 10)  # refused, with the gradients before it
    here.forward("a", 11, LENGTHS, forward_only=True)
    here.forward("a", 12, LENGTHS, target=12)
    here.optim("a", 13, learning_rate=0.1)
    here.add("a", 14, "save_weights_for_sampler", {"model_id": "s:train:a", "seq_id": 14, "path": "sampled"})
    here.forward("a", 15, LENGTHS, target=15)


DONE = (1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15)
"""Those that succeed."""


def ended(here: Here) -> tuple[list[object], dict[str, torch.Tensor], torch.Tensor]:
    """What the script came to: results, the model behind it, with its gradients, and what it has published."""
    here.settle()
    assert "seq_id 8" in str(here.error("a", 10))
    assert here.error("a", 8)
    found, published = results(here, *DONE), flat(here, "s:train:a/4")
    here.optim("a", 16, learning_rate=0.1)
    here.settle()
    return [*found, *results(here, 16)], state(here), published


@pytest.mark.parametrize("replay_s", [0.0, 1000.0])
def test_an_engine_that_dies_at_any_write_changes_nothing(make: Callable[..., Here], replay_s: float) -> None:
    """Before it and behind it, with copies behind each step and without any; also in the recovery of the one before."""
    quiet = make("quiet", replay_s=replay_s)
    script(quiet)
    expected, after, published = ended(quiet)
    saved = {name: checkpoint(quiet, name) for name in ("weights/open", "sampler_weights/sampled")}
    deaths = 0
    for place in range(0, 200, amount(3, 1)):
        here = make(f"dies {place}", replay_s=replay_s)
        script(here)
        here, died = disturbed(here, place)
        assert died or place > 2 * 15
        for _ in range(2 if place % 4 == 0 else 0):  # in the recovery
            here, again = disturbed(here, 1)
            assert again or not died
        found, left, shown = ended(here)
        assert found == expected, place
        assert_same(left, after)
        assert torch.equal(shown, published)
        for name, tensors in saved.items():
            assert_same(checkpoint(here, name), tensors)
        here.process.die("signal 9")
        if not died:
            break
        deaths += 1
    assert deaths > amount(10, 30)


def disturbed(here: Here, writes: int) -> tuple[Here, bool]:
    """Kill the engine at a write, which is done if there were an even number of them before it; returns the next."""
    real, count = here.engine.recorder.store.record, 0

    def record(outcomes: Sequence[Outcome | HistoryChange]) -> None:
        nonlocal count
        if writes // 2 == count and writes % 2 == 0:
            raise DiesNow
        real(outcomes)
        if writes // 2 == count:
            raise DiesNow
        count += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here.engine.recorder.store, "record", record)
        try:
            here.settle()
        except DiesNow:
            return here.next_engine(), True
    return here, False


def checkpoint(here: Here, name: str) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint holds."""
    found = here.store.checkpoint(f"tinker://s:train:a/{name}")
    assert found is not None
    return load_file(Path(here.config.data_dir) / "checkpoints" / found.directory / "adapter.safetensors")


# ---- What does not come back


def test_a_model_that_ends_engines_again_and_again_is_lost_and_others_come_back(make: Callable[..., Here]) -> None:
    here = make()
    another(here, "b")
    step(here, 1)
    step(here, 1, "b")
    here.save("a", 3, "kept")
    here.settle()
    here.optim("a", 4)
    for _ in range(3):
        here = here.next_engine()
        until_back(here, "s:train:a")
    here = here.next_engine()
    lost = str(here.error("a", 4))
    assert lost.startswith("the engine ended while the model was brought back, 3 times now; ")
    assert "newest checkpoint, tinker://s:train:a/weights/kept" in lost
    here.settle()
    assert models(here) == ["b"]
    step(here, 3, "b")
    assert here.error("b", 4) is None
    assert copies(here) == []
    for _ in range(4):  # one that has come back begins to count anew
        here = here.next_engine()
        here.settle()
        assert models(here) == ["b"]


def test_a_model_is_not_lost_because_a_server_is_stopped_again_and_again_while_it_comes_back(
    make: Callable[..., Here],
) -> None:
    here = make()
    step(here, 1)
    before = state(here)
    for _ in range(5):
        here = here.next_engine()
        until_back(here, "s:train:a")
        Stopping(here.engine.scheduler)
        here.engine.recorder.flush()
    here = here.next_engine()
    here.settle()
    assert_same(state(here), before)


def test_a_model_is_not_lost_because_an_operation_of_another_ends_engines(make: Callable[..., Here]) -> None:
    here = make()
    another(here, "b")
    step(here, 1)
    step(here, 1, "b")
    here.forward("a", 3, [30], target=3)
    for _ in range(MOST_ENDS + 1):
        here = here.next_engine()
        until_begun(here, all_back=False)
    here = here.next_engine()
    here.settle()
    assert models(here) == ["a", "b"]
    assert here.error("a", 3) is None


def until_back(here: Here, model_id: str) -> None:
    """Go on until that model is being brought back."""

    def is_at_it() -> bool:
        under_way = here.engine.scheduler.crash_recovery.under_way
        here.process.is_stuck = under_way is not None and under_way.model_id == model_id
        return here.process.is_stuck

    here.until(is_at_it)


def test_operations_fail_before_which_engines_end_again_and_again(make: Callable[..., Here]) -> None:
    """One of them may be what ends them."""
    here = make()
    step(here, 1)
    before = state(here)
    here.process.is_stuck = True
    here.forward("a", 3, [30], target=3)
    here.forward("a", 4, LENGTHS, target=4)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.worker.turn()
    here.until(lambda: "s:train:a/3" in here.told)
    for _ in range(2 * MOST_IDLE_STARTS):  # a supervisor lets none live until its workers are there
        here = here.next_engine()
        here.process.is_ready = False
        here.turn()
        assert here.store.status("s:train:a/4") == "queued"
    for _ in range(MOST_IDLE_STARTS):
        here = here.next_engine()
        until_begun(here)
        assert here.store.status("s:train:a/4") == "queued"
    here.create("b")
    here = here.next_engine()
    assert "5 times now before an operation was done" in str(here.error("a", 4))
    assert "5 times now before an operation was done" in str(here.error("b", 0))
    here.settle()
    assert_same(state(here), before)
    assert "seq_id 4" in run(here, "optim", 5)
    assert run(here, "optim", 6) == ""
    assert "without_gradients" in str(results(here, 6))


def until_begun(here: Here, all_back: bool = True) -> None:
    """Go on until a pass is under way, after all models are back or not."""
    scheduler = here.engine.scheduler
    here.until(lambda: scheduler.forward.passes and not (all_back and scheduler.crash_recovery.waiting))


def run(here: Here, kind: str, seq: int) -> str:
    """The error of an operation of `a`; empty if it succeeds."""
    getattr(here, kind)("a", seq)
    here.settle()
    return str(here.error("a", seq) or "")


def test_models_are_lost_in_a_copy_of_the_data_directory(make: Callable[..., Here]) -> None:
    """Kept copies belong to the original."""
    here = make()
    step(here, 1)
    publish(here, 3)
    here.settle()
    here.optim("a", 4)
    here.process.die("signal 9")
    assert here.store.fail_unfinished("the engine ended", "another directory") == set()
    reason = "the engine ended, and the data directory was moved or copied"
    assert f"{reason}; it has no checkpoint" in str(here.error("a", 4))
    session = here.store.sampling_session("s:sample:3")
    assert session is not None
    assert session.gone == reason
    assert here.store.histories() == []


def test_models_come_back_at_a_place_that_an_earlier_version_gave_another_name(make: Callable[..., Here]) -> None:
    here = make()
    step(here, 1)
    here.settle()
    here.process.die("signal 9")
    assert here.store.fail_unfinished("the engine ended", "the name now", PLACE) == {"s:train:a"}
    assert here.store.fail_unfinished("the engine ended", "the name now") == {"s:train:a"}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_is_lost_whose_base_model_has_other_weights_now(
    make: Callable[..., Here], text_base: BaseModel, steps: int
) -> None:
    """Also one that is made of its seed again."""
    here = make()
    for number in range(steps):
        step(here, 1 + 2 * number)
    other = Future[str]()
    other.set_result("0" * 64)
    here.bases = {"tiny": replace(text_base, computed_fingerprint=other)}
    here.optim("a", 1 + 2 * steps)
    here = here.next_engine()
    here.settle()
    assert "was trained on other weights of the base model than tiny has here" in str(here.error("a", 1 + 2 * steps))
    assert models(here) == []


def test_a_model_is_lost_whose_base_model_is_not_served_any_more(
    make: Callable[..., Here], text_base: BaseModel
) -> None:
    here = make()
    here.optim("a", 1)
    here.bases = {"other": replace(text_base, name="other")}
    here = here.next_engine()
    here.settle()
    assert "base model 'tiny' is not served any more; start the server with it" in str(here.error("a", 1))


def test_a_model_whose_session_ended_meanwhile_is_saved_or_forgotten(make: Callable[..., Here]) -> None:
    for reason, is_saved in (("expired", True), ("success", False)):
        here = make(reason)
        step(here, 1)
        here.forward("a", 3, [4])
        here.store.finish_session("s", reason, None)
        here = here.next_engine()
        here.settle()
        assert here.error("a", 3)
        assert (here.store.checkpoint("tinker://s:train:a/weights/session-end") is not None) == is_saved
        assert (models(here), here.store.histories(), copies(here)) == ([], [], [])


def test_a_worker_that_dies_in_the_recovery_of_an_engine_counts_no_gradient_twice(make: Callable[..., Here]) -> None:
    """Of an operation whose first pass is in the journal."""
    here = make(replay_s=1000.0)
    here.process.is_stuck = True
    here.forward("a", 1, [30], target=1)
    here.forward("a", 2, [30, 30], target=2)
    here.optim("a", 3, learning_rate=0.1)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.worker.turn()
    here.until(lambda: "s:train:a/1" in here.told)
    here = here.next_engine()
    here.until(lambda: here.engine.scheduler.crash_recovery.under_way)
    here.process.die("signal 9")
    here.turn()
    here.new_worker()
    here.settle()
    quiet = make("quiet")
    quiet.forward("a", 1, [30], target=1)
    quiet.forward("a", 2, [30, 30], target=2)
    quiet.optim("a", 3, learning_rate=0.1)
    quiet.settle()
    assert results(here, 1, 2, 3) == results(quiet, 1, 2, 3)
    assert_same(state(here), state(quiet))


def test_a_stop_that_is_cut_short_loses_no_gradients(make: Callable[..., Here]) -> None:
    """A server that stops records what is computed, and may be killed before the model is saved."""
    here = make(replay_s=1000.0)
    here.process.is_stuck = True
    half_computed(here)
    here.until(lambda: here.engine.scheduler.forward.passes)
    stopping = Stopping(here.engine.scheduler)
    here.process.is_stuck = False
    while here.store.status("s:train:a/1") == "queued":
        here.engine.receive(0.0)
        stopping.turn(give_up=False)
    here = here.next_engine()
    quiet = make("quiet")
    half_computed(quiet)
    for each in (here, quiet):
        each.optim("a", 3, learning_rate=0.1)
        each.settle()
    assert results(here, 1, 2, 3) == results(quiet, 1, 2, 3)
    assert_same(state(here), state(quiet))


def half_computed(here: Here) -> None:
    """Two operations, the second of which begins in the pass of the first."""
    here.forward("a", 1, [30], target=1)
    here.forward("a", 2, [20, 20], target=2)


def test_copies_stay_that_the_database_knows(make: Callable[..., Here]) -> None:
    """While it is locked, steps go on, but no copy takes the place of those that the next engine would look for."""
    here = make()
    step(here, 1)
    step(here, 3)
    for seq in (5, 7, 9):
        here.forward("a", seq, LENGTHS, target=seq)
        here.optim("a", seq + 1, learning_rate=0.1)
    here.engine.log_reader.read()
    with here.locked():
        here.until(lambda: len(here.engine.recorder.waiting) >= 6 and here.process.is_resting)
    here = here.next_engine()
    here.settle()
    assert [here.error("a", seq) for seq in range(5, 11)] == [None] * 6


def test_operations_that_were_done_count_though_their_results_are_dropped(make: Callable[..., Here]) -> None:
    here = make()
    for seq in range(1, MOST_IDLE_STARTS + 2):
        assert here.store.status(f"s:train:a/{seq - 1}") in ("done", "dropped")
        here.forward("a", seq, [4])
        here.store.drop_results(time.time() + 1.0, 0.0)
        here = here.next_engine()
        assert here.store.status(f"s:train:a/{seq}") == "queued"
        here.settle()


def test_a_model_is_saved_though_an_operation_came_after_the_end_of_its_session(make: Callable[..., Here]) -> None:
    """It fails before the one that waits."""
    here = make()
    step(here, 1)
    here.optim("a", 3)
    here.store.finish_session("s", "expired", None)
    here.optim("a", 4)
    assert "showed no sign of life" in str(here.error("a", 4))
    here = here.next_engine()
    here.settle()
    assert "weights/session-end" in str(here.error("a", 3))
