"""Models that end in different ways, and what a client is told that still asks for one."""

import time
from dataclasses import replace

from tests.store.test_commands import DESCRIPTION
from tests.store.test_store import checkpoint
from tinsmith.store.records import Model, NewCommand, Outcome
from tinsmith.store.store import Store

NO_CHECKPOINT = "it has no checkpoint to go on from: create a new model, and call save_state from time to time"


def new_model(store: Store, session_id: str, succeeds: bool = True) -> str:
    """A session with a model in it."""
    model_id = f"{session_id}:train:0"
    store.create_session(session_id, DESCRIPTION)
    store.append(
        [NewCommand(model_id, 0, "create_model", b"", model=Model(model_id, session_id, "tiny", {"rank": 8}, {}, None))]
    )
    if succeeds:
        store.record([Outcome(f"{model_id}/0", b"{}", "json", None, None)])
    return model_id


def status_of(store: Store, model_id: str) -> str:
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
    """An idle session whose models were not saved has lost them; a model that is created after its session was finished
    stays finished, and one that was being created is created by the next engine."""
    names = ("finished", "unloaded", "idle", "lost", "unborn", "unsaved", "late")
    finished, unloaded, idle, lost, unborn, unsaved, late = [
        new_model(store, name, name not in ("unborn", "late")) for name in names
    ]
    store.finish_session("finished", "success", None)
    store.unload_model(unloaded)
    for name in ("idle", "unsaved"):
        store.finish_session(name, "expired", "no sign of life for 600 s")
    store.unload_model(idle)
    store.finish_session("late", "interrupted", None)
    store.record([Outcome(f"{late}/0", b"{}", "json", None, None)])
    assert (status_of(store, unsaved), status_of(store, late)) == ("ready", "finished")
    for _ in range(2):
        store.fail_unfinished("the engine died")
    expected = dict.fromkeys((finished, late), "finished") | dict.fromkeys((unloaded, idle), "unloaded")
    expected |= dict.fromkeys((lost, unsaved), "lost") | {unborn: "creating"}
    assert {model_id: status_of(store, model_id) for model_id in expected} == expected
    assert told(store, finished) == (f"model {finished} is finished: its session is finished; {NO_CHECKPOINT}", "user")
    assert told(store, unloaded) == (f"model {unloaded} is unloaded: the server was stopped; {NO_CHECKPOINT}", "user")
    of_idle = "its session is finished, because it showed no sign of life"
    assert told(store, idle) == (f"model {idle} is unloaded: {of_idle}; {NO_CHECKPOINT}", "user")
    assert told(store, lost) == (
        f"model {lost} was lost when its worker or the engine stopped; {NO_CHECKPOINT}",
        "server",
    )


def test_errors_name_the_newest_training_checkpoint_that_has_not_expired(store: Store) -> None:
    model_id, now = new_model(store, "s"), time.time()
    kinds = [
        ("weights/a", 30, None),
        ("weights/newest", 20, now + 3600),
        ("weights/gone", 10, now - 1),
        ("sampler_weights/b", 0, None),
    ]
    for number, (name, ago, expires_at) in enumerate(kinds):
        store.put_checkpoint(
            replace(checkpoint(f"tinker://{model_id}/{name}", expires_at, str(number)), created_at=now - ago)
        )
    store.append([NewCommand(model_id, 1, "optim_step", b"")])
    store.fail_unfinished("the engine died")
    hint = (
        f"go on from its newest checkpoint, tinker://{model_id}/weights/newest, with "
        "create_training_client_from_state_with_optimizer"
    )
    failed = store.outcome(f"{model_id}/1")
    assert failed == Outcome(f"{model_id}/1", None, None, f"the engine died; {hint}", "server")
    assert told(store, model_id) == (
        f"model {model_id} was lost when its worker or the engine stopped; {hint}",
        "server",
    )
