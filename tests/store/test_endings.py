"""Models that end in different ways, and what a client is told that still asks for one."""

import time

from tests.store.test_commands import DESCRIPTION
from tinsmith.store.records import Checkpoint, Model, ModelStatus, NewCommand, Outcome
from tinsmith.store.store import Store
from tinsmith.wire.paths import parse_path

NO_CHECKPOINT = "it has no checkpoint to go on from: create a new model, and call save_state from time to time"


def new_model(store: Store, session_id: str, succeeds: bool = True) -> str:
    """A session with a model in it."""
    model_id = f"{session_id}:train:0"
    store.create_session(session_id, DESCRIPTION)
    store.append([NewCommand(model_id, 0, "create_model", b"", model=Model(model_id, session_id, "tiny", {"rank": 8}, {}, None))])
    if succeeds:
        store.record([Outcome(f"{model_id}/0", b"{}", "json", None, None)])
    return model_id


def save(store: Store, path: str, created_at: float, expires_at: float | None = None) -> None:
    """The row of a checkpoint."""
    parts = parse_path(path)
    store.put_checkpoint(Checkpoint(path, *parts, path, "tiny", "qwen3", {"rank": 8}, True, 1, None, created_at, expires_at))


def status_of(store: Store, model_id: str) -> ModelStatus:
    found = store.model(model_id)
    assert found is not None
    return found.status


def told(store: Store, model_id: str, seq_id: int = 9) -> tuple[str | None, str | None]:
    """Error and category of a further operation."""
    assert store.append([NewCommand(model_id, seq_id, "optim_step", b"")]) == [False]
    outcome = store.outcome(f"{model_id}/{seq_id}")
    assert outcome is not None
    return outcome.error, outcome.category


def test_finished_unloaded_and_lost_stay_three_things_when_the_engine_dies(store: Store) -> None:
    finished, unloaded, idle, lost, unborn = [new_model(store, name) for name in ("finished", "unloaded", "idle", "lost", "unborn")]
    store.finish_session("finished", "success", None)
    store.unload_model(unloaded)
    store.finish_session("idle", "expired", "no sign of life for 600 s")
    store.unload_model(idle)
    for _ in range(2):
        store.fail_unfinished("the engine died")
    expected = {finished: "finished", unloaded: "unloaded", idle: "unloaded", lost: "lost", unborn: "lost"}
    assert {model_id: status_of(store, model_id) for model_id in expected} == expected
    assert told(store, finished) == (f"model {finished} is finished: its session is finished; {NO_CHECKPOINT}", "user")
    assert told(store, unloaded) == (f"model {unloaded} is unloaded: the server was stopped; {NO_CHECKPOINT}", "user")
    of_idle = "its session is finished, because it showed no sign of life"
    assert told(store, idle) == (f"model {idle} is unloaded: {of_idle}; {NO_CHECKPOINT}", "user")
    assert told(store, lost) == (f"model {lost} was lost when its worker or the engine stopped; {NO_CHECKPOINT}", "server")


def test_an_idle_session_whose_models_were_not_saved_has_lost_them(store: Store) -> None:
    model_id = new_model(store, "idle")
    store.finish_session("idle", "expired", "no sign of life for 600 s")
    assert status_of(store, model_id) == "ready"
    store.fail_unfinished("the engine died")
    assert status_of(store, model_id) == "lost"


def test_a_model_that_is_created_after_its_session_was_finished_stays_finished(store: Store) -> None:
    model_id = new_model(store, "s", succeeds=False)
    store.finish_session("s", "interrupted", None)
    store.record([Outcome(f"{model_id}/0", b"{}", "json", None, None)])
    assert status_of(store, model_id) == "finished"


def test_errors_name_the_newest_training_checkpoint_that_has_not_expired(store: Store) -> None:
    model_id, now = new_model(store, "s"), time.time()
    save(store, f"tinker://{model_id}/weights/older", now - 30)
    save(store, f"tinker://{model_id}/weights/newest", now - 20, expires_at=now + 3600)
    save(store, f"tinker://{model_id}/weights/expired", now - 10, expires_at=now - 1)
    save(store, f"tinker://{model_id}/sampler_weights/sampler", now)
    store.append([NewCommand(model_id, 1, "optim_step", b"")])
    store.fail_unfinished("the engine died")
    hint = f"go on from its newest checkpoint, tinker://{model_id}/weights/newest, with create_training_client_from_state_with_optimizer"
    failed = store.outcome(f"{model_id}/1")
    assert failed == Outcome(f"{model_id}/1", None, None, f"the engine died; {hint}", "server")
    assert told(store, model_id) == (f"model {model_id} was lost when its worker or the engine stopped; {hint}", "server")
