"""The engine beside a database that is locked or full for a while: nothing that happened is lost, repeated or called a failure."""

import errno
import os
import resource
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import orjson
import pytest
import torch

from tests.bases import png
from tests.engine.test_loop import MODEL, engine, step
from tinsmith.engine.loop import Engine
from tinsmith.engine.trainer import SAVE_AGAIN_S
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done, EndSession, Saving
from tinsmith.store.database import FILE_NAME
from tinsmith.store.files import SNAPSHOTS_DIR
from tinsmith.store.records import Model, NewCommand
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend
from tinsmith.wire import tinker_pb2
from tinsmith.wire.forward_backward import move_images_out

LONG_S = 120.0
"""How long anything here may take on a busy machine."""


@pytest.fixture
def made(family_dir: Callable[[str], Path], vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with one model that is ready; nobody runs its loop. The base model has passed its self-check elsewhere."""
    monkeypatch.setattr("tinsmith.engine.loop.DATABASE_BUSY_S", 0.05)
    monkeypatch.setattr("tinsmith.engine.loop.load_bases", lambda config: {"tiny": vision_base})
    monkeypatch.setattr("tinsmith.engine.loop.check_base_model", lambda base, samples: None)
    with engine(family_dir("qwen3_vl"), tmp_path) as running:
        turn(running)
        assert running.store.status(f"{MODEL}/0") == "done"
        yield running


@contextmanager
def locked(made: Engine) -> Iterator[sqlite3.Connection]:
    """Another connection holds the lock, as a backup does."""
    other = sqlite3.connect(Path(made.config.data_dir) / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        other.close()


@contextmanager
def full(made: Engine) -> Iterator[None]:
    """No file can grow beyond the size of the database's journal, as on a disk without space."""
    journal = Path(made.config.data_dir) / f"{FILE_NAME}-wal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def unreadable(made: Engine) -> Iterator[None]:
    """The database cannot be opened: the process may open no more files."""
    made.store.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def turn(made: Engine) -> None:
    """Once through the loop."""
    made._take_commands()
    made.recorder.flush()
    if made._may_train:
        made.trainer.turn()


def until(made: Engine, seen: Callable[[], object]) -> None:
    """Go through the loop until that is true, sleeping as the loop does."""
    deadline = time.monotonic() + LONG_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(made._patience())
        turn(made)


def test_a_model_that_the_disk_does_not_take_stays_loaded_until_it_does(made: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session has ended by itself, so no client is there to save it again."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.training.checkpoint.save_file", no_space_left)
        made._handle(EndSession("s", save=True))
        turn(made)
        assert not made.trainer.has_work  # it does not try again and again, which would stall all others
        now += SAVE_AGAIN_S + 1
        assert made.trainer.has_work
        turn(made)
    assert list(made.trainer.operations.models) == [MODEL]
    now += SAVE_AGAIN_S + 1
    turn(made)
    assert not made.trainer.operations.models
    assert not made.trainer.has_work
    assert made.store.checkpoint(f"tinker://{MODEL}/weights/session-end") is not None


def no_space_left(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forward_backward(seq_id: int, length: int = 4, image: bytes | None = None) -> NewCommand:
    message = tinker_pb2.ForwardBackwardRequest(model_id=MODEL, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * length
    if image is not None:
        picture = datum.model_input.add().image
        picture.data, picture.format = image, "png"
        length += 6
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = b"\1\0\0\0\0\0\0\0" * length, tinker_pb2.DTYPE_INT64
    target.shape.append(length)
    stored = move_images_out(message)
    return NewCommand(MODEL, seq_id, "forward_backward", stored.payload, stored.image_digests, stored.images)


def steps_taken(made: Engine) -> float:
    """What the optimizer has counted."""
    backend = made.trainer.operations.model(MODEL).served.backend
    assert isinstance(backend, LocalBackend)
    optimizer = backend.optimizers[MODEL]
    return float(optimizer.adamw.state[optimizer.weights.tensors()[0]]["step"])


def everything_ran(made: Engine) -> bool:
    return not made.trainer.has_work and not made.trainer.put_off and not made.reading.is_failing


@pytest.mark.parametrize("trouble", [locked, full])
def test_a_step_that_was_applied_is_reported_as_applied_once_the_database_takes_it(
    made: Engine, trouble: Callable[[Engine], AbstractContextManager[object]]
) -> None:
    sent: list[Message] = []
    made.recorder.send = sent.append
    requests = [f"{MODEL}/{seq_id}" for seq_id in range(1, 5)]
    made.store.append([step(1), forward_backward(2, length=500), forward_backward(3, length=500), step(4)])
    with trouble(made):
        turn(made)
        until(made, lambda: everything_ran(made))
        assert [outcome.request_id for outcome in made.recorder.waiting] == requests
        assert steps_taken(made) == 1
        assert sent == []
        assert [made.store.status(request) for request in requests] == ["queued"] * 4
    until(made, lambda: not made.recorder.waiting)
    assert [message.request_id for message in sent if isinstance(message, Done)] == requests
    assert [outcome.error for request in requests if (outcome := made.store.outcome(request))] == [None] * 4
    assert steps_taken(made) == 1


def test_failures_wait_for_the_database_too_and_are_told_once(made: Engine) -> None:
    sent: list[Message] = []
    made.recorder.send = sent.append
    body = {"model_id": MODEL, "seq_id": 1, "adam_params": {"learning_rate": -1.0}}
    made.store.append([NewCommand(MODEL, 1, "optim_step", orjson.dumps(body)), step(2)])
    with locked(made):
        turn(made)
        assert sent == []
    until(made, lambda: not made.recorder.waiting)
    assert [isinstance(message, Done) and message.error is not None for message in sent] == [True, False]


def test_training_stops_when_too_much_waits_for_the_database_and_goes_on_afterwards(made: Engine) -> None:
    made.recorder.limit_bytes = 1.0
    made.trainer.tokens_per_pass = made.trainer.operations.bases["tiny"].backend.tokens_per_pass = 1
    made.store.append([forward_backward(1), forward_backward(2)])
    with locked(made):
        turn(made)
        assert made.trainer.has_work
        assert made.recorder.is_full
        turn(made)
        assert made.trainer.has_work
        assert made._patience() > 0
    until(made, lambda: everything_ran(made) and not made.recorder.waiting)


def test_operations_and_pictures_that_cannot_be_read_now_are_read_later(made: Engine) -> None:
    made.store.append([forward_backward(1, image=png(5)), forward_backward(2)])
    with unreadable(made):
        turn(made)
        assert made.reading.is_failing
    made._take_commands()
    with unreadable(made):
        made.trainer.turn()
        assert made.trainer.put_off == {MODEL}
        assert 0 < made._patience() <= 5
        assert made.recorder.waiting == []
    until(made, lambda: everything_ran(made) and not made.recorder.waiting)
    assert [outcome.error for seq_id in (1, 2) if (outcome := made.store.outcome(f"{MODEL}/{seq_id}"))] == [None, None]


def test_a_checkpoint_is_saved_once_the_database_takes_it_and_others_do_not_wait(made: Engine) -> None:
    save = {"model_id": MODEL, "seq_id": 1, "path": "kept"}
    other = orjson.dumps({"session_id": "s", "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}})
    created = NewCommand("s:train:1", 0, "create_model", other, model=Model("s:train:1", "s", "tiny", {"rank": 4}, {}, None))
    made.store.append([NewCommand(MODEL, 1, "save_weights", orjson.dumps(save)), step(2), created])
    with locked(made):
        turn(made)
        assert made.trainer.put_off == {MODEL}
        assert [outcome.request_id for outcome in made.recorder.waiting] == ["s:train:1/0"]
    until(made, lambda: everything_ran(made) and not made.recorder.waiting)
    assert [made.store.status(f"{MODEL}/{seq_id}") for seq_id in (1, 2)] == ["done", "done"]
    assert made.store.checkpoint(f"tinker://{MODEL}/weights/kept") is not None


def test_a_session_that_ends_while_the_database_is_away_is_saved_and_unloaded_later(made: Engine) -> None:
    made.store.append([step(1)])
    with unreadable(made):
        made._handle(EndSession("s", save=True))
        assert made.trainer.ending == {}
    with locked(made):
        until(made, lambda: made.trainer.put_off)
        assert MODEL in made.trainer.operations.models
    until(made, lambda: everything_ran(made) and not made.recorder.waiting)
    assert made.trainer.operations.models == {}
    assert made.store.checkpoint(f"tinker://{MODEL}/weights/session-end") is not None
    cancelled = made.store.outcome(f"{MODEL}/1")
    assert cancelled is not None
    assert cancelled.error == "it was cancelled: its session ended before the operation was run"


def test_files_of_snapshots_that_are_missing_do_not_keep_a_session_from_ending(made: Engine) -> None:
    made.snapshots.memory_bytes = 0
    for seq_id in (1, 2, 3):
        body = {"model_id": MODEL, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
        made.store.append([NewCommand(MODEL, seq_id, "save_weights_for_sampler", orjson.dumps(body))])
    turn(made)
    made.snapshots.spill.settle()
    for directory in (Path(made.config.data_dir) / SNAPSHOTS_DIR).iterdir():
        shutil.rmtree(directory)
    made._handle(EndSession("s", save=False))
    turn(made)
    assert made.trainer.operations.models == {}
    assert made.snapshots.held == {}
    assert made.snapshots.spill.keys() == []


def test_a_step_that_was_applied_is_recorded_before_the_engine_stops(made: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Message] = []
    made.store.append([step(1)])
    with locked(made) as lock:
        turn(made)
        made.stopping = True

        def send(message: Message) -> None:
            told.append(message)
            if sum(isinstance(message, Saving) for message in told) == 2:  # the first attempt to save has failed
                lock.close()

        made.recorder.send = send
        monkeypatch.setattr(made.link, "send", send)
        made.run(os.getppid())
    store = Store.open(Path(made.config.data_dir))
    assert store.checkpoint(f"tinker://{MODEL}/weights/session-end") is not None
    assert store.status(f"{MODEL}/1") == "done"
    assert [message.request_id for message in told if isinstance(message, Done)] == [f"{MODEL}/1"]


def test_outcomes_are_recorded_before_the_engine_stops_also_if_no_model_is_left(made: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made.store.append([step(1)])
    with locked(made) as lock:
        turn(made)
        made.trainer.operations.models.clear()
        made.stopping = True
        monkeypatch.setattr(made.link, "send", lambda message: lock.close() if isinstance(message, Saving) else None)
        made.run(os.getppid())
    assert Store.open(Path(made.config.data_dir)).status(f"{MODEL}/1") == "done"


def test_a_model_whose_load_failed_for_want_of_memory_ends_nothing_else(made: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_model(number: int) -> NewCommand:
        model_id, lora = f"s:train:{number}", {"rank": 0}
        body = orjson.dumps({"session_id": "s", "model_seq_id": number, "base_model": "tiny", "lora_config": lora})
        return NewCommand(model_id, 0, "create_model", body, model=Model(model_id, "s", "tiny", lora, {}, None))

    def refuse(purpose: str, needed: int, device: torch.device, promised: int = 0) -> None:
        raise UserError("no memory")

    saved = {"model_id": "s:train:1", "seq_id": 1, "path": "kept"}
    made.store.append([full_model(1), full_model(2), NewCommand("s:train:1", 1, "save_weights", orjson.dumps(saved))])
    turn(made)
    monkeypatch.setattr("tinsmith.training.backend.require_memory", refuse)
    load = {"model_id": "s:train:2", "seq_id": 1, "path": "tinker://s:train:1/weights/kept", "optimizer": False}
    body = {"model_id": "s:train:2", "seq_id": 2, "adam_params": {}}
    made.store.append(
        [NewCommand("s:train:2", 1, "load_weights", orjson.dumps(load)), NewCommand("s:train:2", 2, "optim_step", orjson.dumps(body))]
    )
    turn(made)
    until(made, lambda: everything_ran(made))
    errors = [outcome.error for seq_id in (1, 2) if (outcome := made.store.outcome(f"s:train:2/{seq_id}"))]
    assert errors == ["no memory", "model s:train:2 is not loaded; create it anew"]
