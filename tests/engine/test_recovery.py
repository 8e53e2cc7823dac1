"""The end of a worker: what it had is lost and says so, what had happened has happened, and the next one goes on."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.here import Here
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.protocol.serving import Done, Ready, Recovering, Sample, SampleFailed
from tinsmith.store.database import FILE_NAME

REASON = "the worker process ended unexpectedly (signal 9)"


@pytest.fixture
def here(text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """One model that is ready."""
    monkeypatch.setattr("tinsmith.engine.loop.DATABASE_BUSY_S", 0.05)
    made = Here({"tiny": text_base}, tmp_path, training=TrainingConfig(tokens_per_pass=64))
    made.create("a")
    made.settle()
    return made


@contextmanager
def locked(here: Here) -> Iterator[None]:
    """Another connection holds the lock of the database, as a backup does."""
    other = sqlite3.connect(Path(here.config.data_dir) / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def test_what_a_worker_had_is_lost_and_named_with_the_newest_checkpoint(here: Here) -> None:
    for seq, name in ((1, "older"), (2, "newest")):
        here.save("a", seq, name)
    here.create("b")
    here.settle()
    here.process.is_stuck = True
    for model in "ab":
        here.forward(model, 3 if model == "a" else 1, [30, 30])
        here.optim(model, 4 if model == "a" else 2)
    here.until(lambda: here.process.passes)
    here.process.die(REASON)
    here.turn()
    assert [message.reason for message in here.said if isinstance(message, Recovering)] == [REASON]
    for model, seqs in (("a", (3, 4)), ("b", (1, 2))):
        for seq in seqs:
            failed = here.outcome(model, seq)
            assert failed.category == "server"
            assert str(failed.error).startswith(f"{REASON}; ")
            assert ("tinker://s:train:a/weights/newest" in str(failed.error)) == (model == "a")
            assert f"s:train:{model}/{seq}" in here.told
    assert "it has no checkpoint to go on from" in str(here.error("b", 1))
    assert here.engine.trainer.operations.models == {}
    assert here.engine.filed == {}
    assert here.is_at_rest


def test_the_next_worker_makes_new_models_and_loads_checkpoints_of_lost_ones(here: Here) -> None:
    here.forward("a", 1, [4])
    here.optim("a", 2)
    here.save("a", 3, "kept")
    here.settle()
    before = [tensor.clone() for tensor in here.backend().optimizers["s:train:a"].weights.tensors()]
    here.process.die(REASON)
    here.turn()
    assert not any(isinstance(message, Ready) for message in here.said)
    here.new_worker()
    here.turn()
    assert any(isinstance(message, Ready) for message in here.said)
    here.create("new")
    here.add(
        "new", 1, "load_weights", {"model_id": "s:train:new", "seq_id": 1, "path": "tinker://s:train:a/weights/kept", "optimizer": True}
    )
    here.settle()
    after = here.backend().optimizers["s:train:new"].weights.tensors()
    assert here.error("new", 1) is None
    assert all((old == new).all() for old, new in zip(before, after, strict=True))
    here.forward("new", 2, [4])
    here.optim("new", 3)
    here.settle()
    assert [here.error("new", seq) for seq in (2, 3)] == [None, None]


def test_what_was_computed_before_is_done(here: Here) -> None:
    """Also if the worker said so with its last breath."""
    here.forward("a", 1, [4])
    here.optim("a", 2)
    here.until(lambda: "s:train:a/1" in here.told)
    here.process.work()  # nobody has heard of the step yet
    here.process.die(REASON)
    here.optim("a", 3)
    here.turn()
    assert [here.error("a", seq) for seq in (1, 2)] == [None, None]
    assert str(here.error("a", 3)).startswith(REASON)


def test_a_model_in_the_making_is_made_by_the_next_worker(here: Here) -> None:
    here.process.is_stuck = True
    here.create("b")
    here.forward("b", 1, [4])
    here.until(lambda: here.engine.trainer.running)
    here.process.die(REASON)
    for _ in range(3):
        here.turn()
    assert here.store.status("s:train:b/0") == "queued"
    here.process.is_stuck = False
    here.new_worker()
    here.settle()
    assert [here.error("b", seq) for seq in (0, 1)] == [None, None]
    assert "s:train:b" in here.backend().optimizers


def test_a_model_whose_making_ends_two_workers_is_not_made_by_a_third(here: Here) -> None:
    """It may be what ends them: every time, all other clients would lose their models."""
    here.process.is_stuck = True
    here.create("b")
    here.create("c")
    here.forward("b", 1, [4])
    for _ in range(2):
        here.until(lambda: "s:train:b" in here.engine.trainer.running)
        here.process.die(REASON)
        here.turn()
        here.new_worker()
    here.process.is_stuck = False
    here.create("d")
    here.settle()
    failed = here.outcome("b", 0)
    assert (failed.error, failed.category) == (f"{REASON} while the model was created, for the second time", "server")
    assert "model s:train:b is not loaded" in str(here.error("b", 1))
    assert here.error("d", 0) is None
    assert here.engine.trainer.made_again == set()


def test_an_engine_sleeps_once_a_locked_database_has_heard_of_the_loss(here: Here) -> None:
    here.process.die(REASON)
    with locked(here):
        here.turn()
        assert here.engine.lost
    here.until(lambda: not here.engine.lost)
    here.turn()
    assert here.engine.patience() > 0


def test_a_locked_database_hears_of_the_loss_later_and_work_begins_only_then(here: Here) -> None:
    here.process.is_stuck = True
    here.optim("a", 1)
    here.until(lambda: here.engine.trainer.running)
    here.create("b")
    here.optim("a", 2)
    here.process.is_stuck = False
    here.process.die(REASON)
    with locked(here):
        here.turn()
    here.new_worker()
    with locked(here):
        for _ in range(3):
            here.turn()
        assert not any(isinstance(message, Ready) for message in here.said)
        assert [here.store.status(f"s:train:{name}") for name in ("a/1", "a/2", "b/0")] == ["queued"] * 3
        assert here.backend().optimizers == {}
    here.settle()
    assert any(isinstance(message, Ready) for message in here.said)
    assert [str(here.error("a", seq)).startswith(REASON) for seq in (1, 2)] == [True, True]
    assert here.error("b", 0) is None
    assert [here.told.count(f"s:train:{name}") for name in ("a/1", "a/2", "b/0")] == [1, 1, 1]
    assert "s:train:a" not in here.engine.trainer.queue.models  # nothing of it is left to be called overdue
    lost = next(place for place, message in enumerate(here.said) if isinstance(message, Done) and message.request_id == "s:train:a/1")
    assert lost < next(place for place, message in enumerate(here.said) if isinstance(message, Ready))


def test_what_comes_while_the_loss_waits_for_an_earlier_outcome_fails_once_with_its_model(here: Here) -> None:
    here.process.is_stuck = True
    here.optim("a", 1)
    here.until(lambda: here.engine.trainer.running)
    here.optim("a", 2)
    here.engine.unread.clear()  # its wake-up is still on the way
    here.process.is_stuck = False
    with locked(here):
        here.until(lambda: here.engine.recorder.waiting)
        here.process.die(REASON)
        here.engine.unread.add("s:train:a")
        here.turn()
    here.new_worker()
    here.settle()
    assert here.error("a", 1) is None
    assert str(here.error("a", 2)).startswith(REASON)
    assert [here.told.count(f"s:train:a/{seq}") for seq in (1, 2)] == [1, 1]
    assert "s:train:a" not in here.engine.trainer.queue.models  # nothing of it is left to be called overdue


def test_a_second_end_before_the_first_is_recorded_loses_nothing(here: Here) -> None:
    here.process.is_stuck = True
    here.optim("a", 1)
    here.until(lambda: here.engine.trainer.running)
    for _ in range(2):
        here.process.die(REASON)
        with locked(here):
            here.turn()
        here.new_worker()
    here.settle()
    assert str(here.error("a", 1)).startswith(REASON)
    assert here.told.count("s:train:a/1") == 1


def test_samples_that_come_while_no_worker_is_there_are_covered_by_the_message_that_it_ended(here: Here) -> None:
    """The server loses all samples when it is told, also those that it has sent since; their clients send them again."""
    here.process.die(REASON)
    here.turn()
    here.say(Sample("s:sample:0/0", 1, "tiny", None, 1, False, b"{}"))
    here.turn()
    assert [message for message in here.said if isinstance(message, Recovering)] == [Recovering(REASON)]
    assert not any(isinstance(message, SampleFailed) for message in here.said)
    here.new_worker()
    here.settle()
    assert not here.worker.samples.has_work
