"""Saves that are written while their own model goes on: what is saved is the model at the save's place among its
operations, or nothing."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.engine.here import LONG_S, Here
from tests.engine.test_recovery import (
    LENGTHS,
    assert_same,
    copies,
    die,
    models,
    results,
    state,
    step,
    undisturbed,
)
from tinsmith.engine.history import CopiedForSave
from tinsmith.protocol.serving import EndSession
from tinsmith.protocol.work import Answer, CallFailed, Copied
from tinsmith.store.catalog import delete_checkpoint, restore_checkpoint
from tinsmith.store.keys import add_key, revoke_key
from tinsmith.store.records import LOCAL, SESSION_END, ApiKey, Checkpoint, Command, Outcome
from tinsmith.store.store import sweep
from tinsmith.store.usage import stored_bytes
from tinsmith.training.checkpoint import SavedState, read_state, write_state
from tinsmith.worker.exports import write_external

pytestmark = pytest.mark.usefixtures("database")

MODEL = "s:train:a"


class SlowDisk:
    """Takes the files of saves only once it is `released`. What else is written, such as kept copies, does not wait."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.released.set()
        self.is_full = False
        self.writing = self.most = self.count = 0
        """Saves that are being written now, most of them at a time, and all that were written."""

    def hold(self) -> None:
        """Hold what comes from now on."""
        self.reached.clear()
        self.released.clear()

    def write(self, real: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Write as the real function does, later."""
        self.writing += 1
        self.count += 1
        self.most = max(self.most, self.writing)
        self.reached.set()
        assert self.released.wait(LONG_S)
        self.writing -= 1
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr("tinsmith.worker.models.write_state", partial(slow.write, write_state))
    monkeypatch.setattr("tinsmith.worker.models.write_external", partial(slow.write, write_external))
    yield slow
    slow.released.set()


@pytest.fixture
def here(disk: SlowDisk, make: Callable[..., Here], request: pytest.FixtureRequest) -> Here:
    """A model after a step, of which steps leave copies, unless the test is `uncopied`."""
    made = make(kept_copies_gib=getattr(request, "param", 32.0))
    step(made, 1)
    return made


uncopied = pytest.mark.parametrize("here", [0.0], indirect=True)
"""Steps leave no copies."""


def hold_save(here: Here, disk: SlowDisk, seq: int = 3, name: str = "kept") -> None:
    """A save of `a` whose copy is there, and is being written."""
    disk.hold()
    here.save("a", seq, name)
    here.until(lambda: here.engine.scheduler.models[MODEL].saving and disk.reached.is_set())


def step_beside(here: Here, seq: int) -> None:
    """A whole step of `a`, to its end, while a save is written."""
    here.forward("a", seq, LENGTHS, target=seq)
    here.optim("a", seq + 1, learning_rate=0.1)
    here.until(lambda: {f"{MODEL}/{seq}", f"{MODEL}/{seq + 1}"} <= set(here.told))
    assert results(here, seq, seq + 1)


def saved(here: Here, name: str = "kept") -> SavedState:
    """What a checkpoint of `a` holds."""
    row = here.store.require_checkpoint(f"tinker://{MODEL}/weights/{name}")
    directory = Path(here.worker.models.files.shown(row.directory))
    return read_state(directory, here.backend().base, optimizer=row.has_optimizer)


def tensors_of(read: SavedState) -> dict[str, Tensor]:
    return {**read.tensors, **(read.moments or {})}


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_is_of_before_the_steps_beside_it_which_are_those_without_one(
    here: Here, disk: SlowDisk, make: Callable[..., Here], fails: bool
) -> None:
    """A write that fails fails the save alone."""
    before = state(here)
    hold_save(here, disk)
    step_beside(here, 4)
    assert (here.store.status(f"{MODEL}/3"), here.store.checkpoint(f"tinker://{MODEL}/weights/kept")) == (
        "queued",
        None,
    )
    assert len(here.engine.scheduler.unfinished(MODEL)) == 1
    disk.is_full = fails
    disk.released.set()
    here.settle()
    assert here.told[-1] == f"{MODEL}/3"
    if fails:
        refused = here.outcome("a", 3)
        assert ("No space left on device" in str(refused.error), refused.category) == (True, "server")
        assert (here.checkpoint_directories(), here.store.checkpoint(f"tinker://{MODEL}/weights/kept")) == ([], None)
    else:
        assert results(here, 3)
        assert_same(tensors_of(saved(here)), before)
    disk.is_full = False
    step(here, 6)
    expected, after = undisturbed(make, 1, 4, 6, save=3)
    assert results(here, 1, 2, 4, 5, 6, 7) == expected
    assert_same(state(here), after)


def test_a_copy_that_fails_fails_the_save_before_anything_behind_it(
    here: Here, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_arguments: object) -> SavedState:
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(here.backend(), "copy_state", failing)
        here.save("a", 3, "kept")
        here.optim("a", 4)
        here.settle()
    assert "no room for a copy" in str(here.error("a", 3))
    assert here.told[-2:] == [f"{MODEL}/3", f"{MODEL}/4"]
    assert here.engine.scheduler.models[MODEL].saving is None


# ---- One at a time


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_next_save_of_a_model_waits_for_the_one_before(here: Here, disk: SlowDisk, overwrite: bool) -> None:
    before = state(here)
    hold_save(here, disk)
    step_beside(here, 4)
    after = state(here)
    here.add("a", 6, "save_weights", {"model_id": MODEL, "seq_id": 6, "path": "kept", "overwrite": overwrite})
    here.forward("a", 7, LENGTHS)
    here.until(lambda: here.engine.scheduler.models[MODEL].next_is_save)
    for _ in range(5):
        here.turn()
    assert [here.store.status(f"{MODEL}/{seq}") for seq in (3, 6, 7)] == ["queued"] * 3
    disk.released.set()
    here.settle()
    assert (disk.most, here.engine.scheduler.models[MODEL].next_is_save) == (1, False)
    assert results(here, 3, 7)
    if overwrite:
        assert results(here, 6)
    else:
        assert f"tinker://{MODEL}/weights/kept exists already" in str(here.error("a", 6))
    assert_same(tensors_of(saved(here)), after if overwrite else before)


# ---- What a lost worker leaves


@uncopied
@pytest.mark.parametrize("is_written", [True, False])
def test_a_model_whose_save_a_step_has_overtaken_comes_back_with_that_step(
    here: Here, disk: SlowDisk, is_written: bool
) -> None:
    """A save that is written is what the replay begins from, and one that was cut short is done again in its course."""
    before = state(here)
    hold_save(here, disk)
    step_beside(here, 4)
    after = state(here)
    if is_written:
        disk.released.set()
        here.settle()
        assert results(here, 3)
    here.process.passes.clear()
    die(here)
    disk.released.set()
    here.settle()
    assert len(here.process.passes) == (2 if is_written else 4)
    assert_same(state(here), after)
    assert results(here, 3)
    assert_same(tensors_of(saved(here)), before)
    assert here.engine.scheduler.models[MODEL].saving is None


@uncopied
def test_a_save_that_no_step_has_overtaken_holds_the_state_of_its_model(here: Here, disk: SlowDisk) -> None:
    """What is computed beside it changes no state, and neither does a step that is refused."""
    before = state(here)
    hold_save(here, disk)
    here.forward("a", 4, LENGTHS)
    here.add("a", 5, "forward_backward", b"no protobuf")
    here.optim("a", 6)
    here.until(lambda: f"{MODEL}/6" in here.told)
    assert "the step was refused" in str(here.error("a", 6))
    disk.released.set()
    here.settle()
    die(here)
    here.settle()
    assert_same(state(here), before)


@uncopied
def test_a_model_comes_back_from_a_save_in_the_place_of_one_that_was_overwritten(here: Here) -> None:
    """Also if no step came between them, and the state before them is gone."""
    body = {"model_id": MODEL, "path": "kept", "overwrite": True}
    for seq in (3, 4, 7, 8):
        if seq == 7:
            step(here, 5)
        here.add("a", seq, "save_weights", body | {"seq_id": seq})
        here.settle()
    sweep(here.store, here.worker.models.files)  # as the server does now and then
    before = state(here)
    here.process.passes.clear()
    die(here)
    here.settle()
    assert here.process.passes == []
    assert_same(state(here), before)


@uncopied
@pytest.mark.parametrize("heard", [True, False])
def test_a_step_that_runs_when_the_save_ends_is_taken_once(here: Here, disk: SlowDisk, heard: bool) -> None:
    """The worker has taken it and dies, and the engine may have heard of it or not."""
    hold_save(here, disk)
    here.forward("a", 4, LENGTHS)
    here.until(lambda: f"{MODEL}/4" in here.told)
    here.optim("a", 5, learning_rate=0.1)
    here.until(lambda: here.engine.scheduler.models[MODEL].running)
    here.process.work()
    # It may tell its status too
    (stepped,) = [message for message in here.process.wire.taken() if isinstance(message, Answer)]
    after = state(here)
    disk.released.set()
    here.until(lambda: f"{MODEL}/3" in here.told)
    if heard:
        here.process.wire.sent.append(stepped)
        here.until(lambda: f"{MODEL}/5" in here.told)
    die(here)
    here.settle()
    assert results(here, 3, 4, 5)
    assert_same(state(here), after)


# ---- The end of a worker


def test_a_save_that_is_cut_short_is_written_again_before_what_comes_behind_it(here: Here, disk: SlowDisk) -> None:
    before = state(here)
    hold_save(here, disk)
    saving = here.engine.scheduler.models[MODEL].saving
    assert saving is not None
    number = saving.in_call
    assert number is not None
    here.process.is_stuck = True
    here.forward("a", 4, LENGTHS)
    here.until(lambda: here.process.passes and here.process.passes[-1].pieces[0][0] == f"{MODEL}/4")
    here.optim("a", 5, learning_rate=0.1)
    die(here)
    here.until(lambda: f"{MODEL}/5" in here.told)
    for message in (Copied(number), Answer(number, {}), CallFailed(number, "TinsmithError", "too late")):
        here.engine.handle_worker(message)  # the former worker has said it
    assert here.store.status(f"{MODEL}/3") == "queued"
    disk.released.set()
    here.settle()
    assert results(here, 3, 4, 5)
    assert_same(tensors_of(saved(here)), before)


def test_a_save_that_is_cut_short_behind_a_step_is_done_again_at_its_place(here: Here, disk: SlowDisk) -> None:
    """There is no copy of a step behind it meanwhile: a model that came back from one could not be saved as it was."""
    before = state(here)
    hold_save(here, disk)
    step_beside(here, 4)
    after = state(here)
    assert copies(here) == [2]
    here.save("a", 6, "next")
    here.until(lambda: here.engine.scheduler.models[MODEL].next_is_save)
    die(here)
    disk.released.set()
    here.settle()
    assert_same(state(here), after)
    assert_same(tensors_of(saved(here)), before)
    assert_same(tensors_of(saved(here, "next")), after)
    step(here, 7)
    assert results(here, 3, 6, 7, 8)
    assert copies(here) == [2, 8]


def test_a_save_that_the_disk_refuses_when_it_is_done_again_fails_alone(here: Here, disk: SlowDisk) -> None:
    hold_save(here, disk)
    step_beside(here, 4)
    after = state(here)
    die(here)
    disk.is_full = True
    disk.released.set()
    here.settle()
    assert "No space left on device" in str(here.error("a", 3))
    assert_same(state(here), after)
    events = here.engine.scheduler.models.loaded[MODEL].history.events
    assert [event for event in events if isinstance(event, CopiedForSave)] == []


# ---- The database


def test_a_model_goes_on_while_the_row_of_its_save_waits_and_nothing_is_written_again(
    here: Here, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, put = 0, here.store.put_saved

    def putting(checkpoint: Checkpoint, command: Command, kept: int | None) -> None:
        nonlocal attempts
        attempts += 1
        put(checkpoint, command, kept)

    monkeypatch.setattr(here.store, "put_saved", putting)
    before = state(here)
    hold_save(here, disk)
    here.process.is_stuck = True
    here.forward("a", 4, LENGTHS, target=4)
    here.optim("a", 5, learning_rate=0.1)
    here.until(lambda: here.engine.scheduler.forward.passes)
    with here.locked():
        disk.released.set()
        here.until(lambda: here.engine.scheduler.models[MODEL].waits_for_row)
        assert here.engine.scheduler.wait_s < LONG_S
        here.process.is_stuck = False
        here.until(lambda: here.engine.scheduler.models.loaded[MODEL].history.state == 2 and attempts >= 3)
        assert here.engine.scheduler.models.put_off == set()
        # It has neither failed nor succeeded
        waiting = here.engine.recorder.waiting
        assert f"{MODEL}/3" not in {each.request_id for each in waiting if isinstance(each, Outcome)}
        assert here.store.status(f"{MODEL}/3") == "queued"
    here.settle()
    assert results(here, 3, 4, 5)
    assert_same(tensors_of(saved(here)), before)
    assert (disk.count, here.engine.scheduler.waits.backoff.is_failing) == (1, False)
    assert here.checkpoint_directories() == [here.store.require_checkpoint(f"tinker://{MODEL}/weights/kept").directory]


def test_a_save_that_waits_for_its_row_outlives_the_worker(here: Here, disk: SlowDisk) -> None:
    """All that the checkpoint needs of the worker is written."""
    before = state(here)
    hold_save(here, disk)
    step_beside(here, 4)
    with here.locked():
        disk.released.set()
        here.until(lambda: here.engine.scheduler.models[MODEL].waits_for_row)
        die(here)
    here.settle()
    assert results(here, 3)
    assert_same(tensors_of(saved(here)), before)
    assert copies(here) == [2]


# ---- Ends


@pytest.mark.parametrize("save", [True, False])
def test_a_model_is_unloaded_when_its_save_has_ended(here: Here, disk: SlowDisk, save: bool) -> None:
    hold_save(here, disk)
    step_beside(here, 4)
    after = state(here)
    here.save("a", 6, "behind")
    here.until(lambda: here.engine.scheduler.models[MODEL].next_is_save)
    here.store.finish_session("s", "idle", None)
    here.say(EndSession("s", save=save))
    here.until(lambda: here.engine.scheduler.models[MODEL].cancelled)
    assert models(here) == ["a"]
    disk.released.set()
    here.settle()
    assert results(here, 3)
    assert models(here) == []
    assert (here.store.checkpoint(f"tinker://{MODEL}/weights/session-end") is not None) == save
    newest = "session-end" if save else "kept"
    assert f"go on from its newest checkpoint, tinker://{MODEL}/weights/{newest}, with create_" in str(
        here.error("a", 6)
    )
    if save:
        assert_same(tensors_of(saved(here, "session-end")), after)


def test_an_engine_that_is_stopped_ends_the_saves_that_are_written(here: Here, disk: SlowDisk) -> None:
    """It says that it writes one, so the server has patience with it."""
    hold_save(here, disk)
    assert here.engine.scheduler.models.saving == MODEL
    step_beside(here, 4)
    after = state(here)
    threading.Timer(0.5, disk.released.set).start()
    here.engine._end()
    assert here.engine.scheduler.models.saving is None
    assert here.engine.scheduler.is_stopped
    assert results(here, 3)
    assert_same(tensors_of(saved(here, "session-end")), after)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_engine_that_is_stopped_does_not_wait_for_ever_for_a_row(
    here: Here, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("tinsmith.engine.loop.BUSY_S", 0.5)
    hold_save(here, disk)
    with here.locked():
        disk.released.set()
        here.until(lambda: here.engine.scheduler.models[MODEL].waits_for_row)
        if is_lost:
            # As when it could not come back after its workers had ended
            here.engine.scheduler.models[MODEL].loaded = None
        here.engine._end()
    assert here.engine.scheduler.is_stopped
    assert here.store.status(f"{MODEL}/3") == "queued"  # which the next server calls failed


def test_saves_that_were_let_in_together_stop_where_the_keys_of_their_tenant_end(here: Here) -> None:
    """Those of a session's end are kept whatever the limit, and a revoked key allows nothing."""
    add_key(here.store, ApiKey("small", "", b"", LOCAL, "member", storage_bytes=1))
    add_key(here.store, ApiKey("gone", "", b"", LOCAL, "member"))
    revoke_key(here.store, "gone")
    for seq in (3, 4, 5):
        here.save("a", seq, f"save{seq}")
    here.settle()
    assert results(here, 3)
    size = here.store.require_checkpoint(f"tinker://{MODEL}/weights/save3").size_bytes
    for seq in (4, 5):
        refused = here.outcome("a", seq)
        assert refused.category == "user"
        assert f"tenant 'local' stores {size:,} bytes of checkpoints, and its keys allow 1" in str(refused.error)
    here.say(EndSession("s", save=True))
    here.settle()
    assert here.store.checkpoint(f"tinker://{MODEL}/weights/{SESSION_END}") is not None


def test_what_is_kept_of_a_session_that_ended_takes_the_place_of_no_save_of_its_client(here: Here) -> None:
    """It expires: of a run that may keep one checkpoint nothing would be left."""
    add_key(here.store, ApiKey("team", "", b"", LOCAL, "member", kept_checkpoints=1))
    for seq, name in ((3, "older"), (4, "newer")):
        here.save("a", seq, name)
    here.settle()
    here.say(EndSession("s", save=True))
    here.settle()
    living = [
        name for name in ("older", "newer", SESSION_END) if here.store.checkpoint(f"tinker://{MODEL}/weights/{name}")
    ]
    assert living == ["newer", SESSION_END]


def test_deleted_checkpoints_make_room_for_saves_oldest_first_and_none_goes_in_vain(here: Here) -> None:
    """A run that keeps its newest checkpoint would soon have no room for another, for a day."""
    here.save("a", 3, "save3")
    here.settle()
    size = here.store.require_checkpoint(f"tinker://{MODEL}/weights/save3").size_bytes
    add_key(here.store, ApiKey("team", "", b"", LOCAL, "member", kept_checkpoints=1, storage_bytes=3 * size))
    for seq in (4, 5, 6, 7):
        here.save("a", seq, f"save{seq}")
    here.settle()
    assert results(here, 4, 5, 6, 7)
    assert stored_bytes(here.store) == {LOCAL: 3 * size}
    paths = [f"tinker://{MODEL}/weights/save{seq}" for seq in (5, 6)]
    for path in paths:
        restore_checkpoint(here.store, path)
    delete_checkpoint(here.store, paths[0])
    add_key(here.store, ApiKey("less", "", b"", LOCAL, "member", storage_bytes=2 * size))
    revoke_key(here.store, "team")
    here.save("a", 8, "save8")
    here.settle()
    assert f"stores {2 * size:,} bytes of checkpoints, and its keys allow {2 * size:,}" in str(here.error("a", 8))
    restore_checkpoint(here.store, paths[0])
