"""The engine beside a locked or full database: nothing that happened is lost, repeated or called a failure.

Invariant: A step that was applied is reported as applied, once, however long the database refuses writes.
Also: `tests/server/test_database_trouble.py`, `tests/acceptance/test_database_trouble.py`.
"""

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.bases import png
from tests.engine.here import Here, is_idle
from tinsmith.engine.operations import SAVE_AGAIN_S
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Bye, Done, EndSession, Saving, Shutdown
from tinsmith.store.postgresql import PostgreSQLDatabase
from tinsmith.store.records import Outcome
from tinsmith.store.sqlite import SQLiteDatabase
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")

MODEL = "s:train:a"


@pytest.fixture
def here(vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """One model that is ready."""
    monkeypatch.setattr("tinsmith.engine.loop.DATABASE_BUSY_S", 0.05)
    made = Here({"tiny": vision_base}, tmp_path)
    made.create("a")
    made.settle()
    return made


@contextmanager
def unreadable(here: Here) -> Iterator[None]:
    """The database cannot be opened: the process may open no more files.

    It keeps the connection that holds the log in its place.
    """
    assert isinstance(here.store._database, SQLiteDatabase | PostgreSQLDatabase)
    here.store._database._engine.dispose()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


UNSAVED = "it was cancelled, and its model could not be saved: the checkpoint could not be written to "


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def has_saved(here: Here, name: str = "session-end") -> bool:
    """Whether there is a checkpoint of the model `a` under this name."""
    return here.store.checkpoint(f"tinker://{MODEL}/weights/{name}") is not None


def test_a_model_that_the_disk_does_not_take_stays_loaded_until_it_does(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has ended by itself, so no client is there to save it again."""
    passed, now = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    scheduler = here.engine.scheduler
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.training.checkpoint.write_tensors", no_space)
        here.optim("a", 1)
        here.say(EndSession("s", save=True))
        here.settle()
        assert str(here.error("a", 1)).startswith(UNSAVED)
        for _ in range(2):
            assert SAVE_AGAIN_S - 30 < scheduler.wait_s <= SAVE_AGAIN_S  # not again and again
            assert list(scheduler.models.loaded) == [MODEL]
            passed += SAVE_AGAIN_S + 1
            here.process.is_stuck = True
            here.turn()
            assert scheduler.wait_s > 0  # it sleeps while the worker saves
            here.process.is_stuck = False
            here.settle()
    passed += SAVE_AGAIN_S + 1
    here.settle()
    assert (scheduler.models.loaded, has_saved(here)) == ({}, True)


def test_a_step_that_was_applied_is_reported_as_applied_once_the_database_takes_it(here: Here) -> None:
    """Failures wait for it too. A full disk is no other case: `tests/acceptance/test_database_trouble.py`."""
    told = len(here.told)
    requests = [f"{MODEL}/{seq_id}" for seq_id in range(1, 6)]
    here.optim("a", 1)
    for seq_id in (2, 3):
        here.forward("a", seq_id, [500])
    here.optim("a", 4)
    here.optim("a", 5, learning_rate=-1.0)
    engine, optimizer = here.engine, here.backend().optimizers[MODEL]
    with here.locked():  # nothing is left but to record outcomes
        here.until(
            lambda: (
                not (engine.log_reader.unread or engine.scheduler.forward.passes)
                and is_idle(engine.scheduler)
                and here.process.is_resting
            )
        )
        assert [each.request_id for each in engine.recorder.waiting if isinstance(each, Outcome)] == requests
        assert here.told[told:] == []
        assert [here.store.status(request) for request in requests] == ["queued"] * 5
    here.settle()
    assert here.told[told:] == requests
    assert [here.error("a", seq_id) is not None for seq_id in range(1, 6)] == [False] * 4 + [True]
    assert {value.item() for name, value in optimizer.moments().items() if name.endswith(".step")} == {1}


def test_training_stops_when_too_much_waits_for_the_database_and_goes_on_afterwards(here: Here) -> None:
    here.engine.recorder.limit_bytes = 1.0
    here.forward("a", 1, [4])
    here.forward("a", 3, [4])
    with here.locked():
        here.until(lambda: here.engine.recorder.is_full)
        here.engine.scheduler.models[MODEL].queue.next_seq = 3  # the next operation is ready
        for _ in range(5):
            here.turn()
        assert len(here.process.passes) == 1
        assert here.engine.patience() > 0
    here.settle()
    assert len(here.process.passes) == 2
    assert here.error("a", 3) is None


@pytest.mark.alone
def test_operations_and_images_that_cannot_be_read_now_are_read_later(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine, and then by the worker. Those behind them wait with them."""
    reads, read = 0, here.worker.blobs.read

    def reading(digest: bytes) -> bytes | None:
        nonlocal reads
        reads += 1
        if reads > 1:
            return read(digest)
        with unreadable(here):
            return read(digest)

    monkeypatch.setattr(here.worker.blobs, "read", reading)
    here.forward("a", 1, [4], images=[png(5)])
    here.forward("a", 2, [4])
    here.optim("a", 3)
    with unreadable(here):
        here.turn()
        assert here.engine.reading.is_failing
    here.engine.log_reader.read()
    here.engine.reading.succeeded()
    with unreadable(here):
        here.turn()  # the operations cannot be read
        assert here.engine.scheduler.models.put_off == {MODEL}
        assert 0 < here.engine.patience() <= 5
    here.until(lambda: here.engine.scheduler.forward.operations)
    assert here.engine.recorder.waiting == []
    here.until(lambda: here.engine.scheduler.models.put_off)  # the worker has not found the image
    here.settle()
    assert reads >= 2
    assert [here.error("a", seq_id) for seq_id in (1, 2, 3)] == [None] * 3
    assert here.told[-3:] == [f"{MODEL}/{seq_id}" for seq_id in (1, 2, 3)]


def test_a_checkpoint_is_saved_once_the_database_takes_it_and_others_do_not_wait(here: Here) -> None:
    here.save("a", 1, "kept")
    here.optim("a", 2)
    here.create("b")
    with here.locked():
        here.until(lambda: here.engine.scheduler.models.put_off and here.engine.recorder.waiting)
        assert here.engine.scheduler.models.put_off == {MODEL}
        waiting = here.engine.recorder.waiting
        assert [each.request_id for each in waiting if isinstance(each, Outcome)] == ["s:train:b/0"]
        assert here.checkpoint_directories() == []
    here.settle()
    assert [here.error("a", seq_id) for seq_id in (1, 2)] == [None, None]
    assert has_saved(here, "kept")


@pytest.mark.alone
def test_a_session_that_ends_while_the_database_is_away_is_saved_and_unloaded_later(here: Here) -> None:
    here.optim("a", 1)
    with unreadable(here):
        here.say(EndSession("s", save=True))
        here.turn()
        assert here.engine.scheduler.models[MODEL].ending is None
    with here.locked():
        here.until(lambda: here.engine.scheduler.models.put_off)
        assert MODEL in here.engine.scheduler.models.loaded
    here.settle()
    assert (here.engine.scheduler.models.loaded, has_saved(here)) == ({}, True)
    assert f"go on from its newest checkpoint, tinker://{MODEL}/weights/session-end, with" in str(here.error("a", 1))


def test_what_is_left_when_the_engine_stops_ends_with_an_error_also_if_its_model_cannot_be_saved(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is computed in part, and what is queued: nobody is left to wait for.

    Nor is it said that anything is tried again.
    """
    monkeypatch.setattr("tinsmith.training.checkpoint.write_tensors", no_space)
    here.engine.scheduler.forward.order.paces.full["tiny"] = here.backend().passes.tokens_per_pass = 3
    here.forward("a", 1, [3] * 8)
    here.optim("a", 2)
    here.until(lambda: any(operation.results for operation in here.engine.scheduler.forward.operations.get(MODEL, ())))
    said = run_to_the_end(here, monkeypatch)
    assert f"model {MODEL} cannot be saved, and the server stops: " in caplog.text
    assert "tried again" not in caplog.text
    assert {message.request_id for message in said if isinstance(message, Done)} == {f"{MODEL}/1", f"{MODEL}/2"}
    assert [str(here.error("a", seq)).startswith(UNSAVED) for seq in (1, 2)] == [True, True]


def run_to_the_end(
    here: Here, monkeypatch: pytest.MonkeyPatch, hear: Callable[[list[Message]], None] = lambda said: None
) -> list[Message]:
    """Stop the engine and let it run until it ends; `hear` gets all that it has said, whenever it says something."""
    said: list[Message] = []

    def send(message: Message) -> None:
        said.append(message)
        hear(said)

    monkeypatch.setattr(here.server, "send", send)
    here.say(Shutdown())
    here.engine.run(os.getppid())
    here.store = Store.open(Path(here.config.data_dir))
    return said


@pytest.mark.parametrize("left", ["model", "worker", "nothing"])
def test_a_step_that_was_applied_is_recorded_before_the_engine_stops(
    here: Here, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Also if no model is left to be saved, or no worker."""
    here.optim("a", 1)
    with here.locked() as lock:
        here.until(lambda: here.engine.recorder.waiting)
        if left != "model":
            here.engine.scheduler.models[MODEL].loaded = None
            here.process.is_ready = left == "worker"

        def hear(said: list[Message]) -> None:
            # The first attempt has failed
            if sum(isinstance(message, Saving) for message in said) == (2 if left == "model" else 1):
                lock.close()

        said = run_to_the_end(here, monkeypatch, hear)
    assert (has_saved(here), here.error("a", 1)) == (left == "model", None)
    assert [message.request_id for message in said if isinstance(message, Done)] == [f"{MODEL}/1"]


def test_a_model_that_is_being_made_when_the_engine_is_stopped_does_not_keep_it(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.process.is_stuck = True
    here.create("b")
    here.until(lambda: here.engine.scheduler.models.running)
    here.process.is_stuck = False
    said = run_to_the_end(here, monkeypatch)
    assert isinstance(said[-1], Bye)
    assert here.error("b", 0) is None
    assert here.store.checkpoint("tinker://s:train:b/weights/session-end") is not None


def test_every_error_of_a_client_that_sent_ahead_names_the_checkpoint_of_the_stop(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the engine had read, prepared or begun, and of what it had not read: that the next server fails."""
    here.process.is_stuck = True
    for seq in range(1, 40, 2):
        here.forward("a", seq, [20])
        here.optim("a", seq + 1)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.process.is_stuck = False
    for seq in range(41, 45):
        here.optim("a", seq)
    run_to_the_end(here, monkeypatch)
    here.store.fail_unfinished("the server was restarted")
    errors = [error for error in (here.error("a", seq) for seq in range(1, 45)) if error is not None]
    assert len(errors) > 30
    remedy = (
        f"; go on from its newest checkpoint, tinker://{MODEL}/weights/session-end, with "
        "create_training_client_from_state_with_opt"
    )
    assert [error for error in errors if remedy not in error] == []


def test_a_model_whose_load_failed_for_want_of_memory_ends_nothing_else(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(purpose: str, needed: int, device: torch.device, promised: int = 0) -> None:
        raise UserError("no memory")

    for model in "bc":
        here.create(model, rank=0)
    here.save("b", 1, "kept")
    here.settle()
    monkeypatch.setattr("tinsmith.training.model_memory.require_memory", refuse)
    load = {"model_id": "s:train:c", "seq_id": 1, "path": "tinker://s:train:b/weights/kept", "optimizer": False}
    here.add("c", 1, "load_weights", load)
    here.optim("c", 2)
    here.settle()
    assert [here.error("c", seq_id) for seq_id in (1, 2)] == [
        "no memory",
        "model s:train:c is not loaded; create it anew",
    ]
    here.optim("a", 1)
    here.settle()
    assert here.error("a", 1) is None
