"""The end of a worker: models come back as they were, and what cannot come back says so.

Invariant: After its worker ended, a model has the bits that it had, with the gradients of its open step, or is lost and
says so; no step uses a part of its gradients or counts one twice. Also: `tests/acceptance/test_worker_death.py`.

Invariant: An operation or model that ends workers three times fails or is lost, and all others come back.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sqlalchemy import select
from torch import Tensor

from tests.engine.here import Here
from tests.extent import slow
from tinsmith.engine.history import Stepped
from tinsmith.errors import StoreUnavailableError
from tinsmith.protocol.serving import Done, EndSession, Ready, Recovering, Sample, SampleFailed
from tinsmith.protocol.work import Answer, PassDone
from tinsmith.store.files import kept_copies
from tinsmith.store.records import Command, Model, SamplingSession
from tinsmith.store.schema import commands

# Of the engine, `test_saves.py` and `test_database_trouble.py` always run on both databases
pytestmark = [
    pytest.mark.usefixtures("database"),
    pytest.mark.parametrize("database", ["sqlite", *slow("postgresql")], indirect=True),
]

REASON = "the worker process ended unexpectedly (signal 9)"
LENGTHS = [30, 20, 30]
"""Of a call that takes two passes."""


@pytest.fixture
def here(make: Callable[..., Here]) -> Here:
    """One model that is ready."""
    return make()


def state(here: Here, model: str = "a") -> dict[str, Tensor]:
    """All that a step changes, copied."""
    optimizer = here.backend().optimizers[f"s:train:{model}"]
    tensors = {**optimizer.weights.named_tensors(), **optimizer.moments()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal to the last bit."""
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def step(here: Here, seq: int, model: str = "a") -> None:
    """A whole step, to its end."""
    here.forward(model, seq, LENGTHS, target=seq)
    here.optim(model, seq + 1, learning_rate=0.1)
    here.settle()


def die(here: Here) -> None:
    """The worker dies, and another takes its place."""
    here.process.is_stuck = False
    here.process.die(REASON)
    here.turn()
    here.new_worker()


def die_when(here: Here, reached: Callable[[], object], times: int = 3) -> None:
    """The worker dies whenever that is true."""

    def is_stuck() -> bool:
        here.process.is_stuck = bool(reached())
        return here.process.is_stuck

    for _ in range(times):
        here.until(is_stuck)
        die(here)


def another(here: Here, *names: str, rank: int = 4) -> None:
    """More models that are ready."""
    for name in names:
        here.create(name, rank=rank)
    here.settle()


def models(here: Here) -> list[str]:
    """Those that are loaded."""
    return [model_id.removeprefix("s:train:") for model_id in here.engine.scheduler.models.loaded]


def copies(here: Here) -> list[int]:
    """The steps of `a` of which there are kept copies."""
    directory = kept_copies(Path(here.config.data_dir), "s:train:a")
    return sorted(int(copy.name) for copy in directory.iterdir()) if directory.exists() else []


def results(here: Here, *seqs: int) -> list[object]:
    """What operations of `a` came to, none of which has failed."""
    outcomes = [here.outcome("a", seq) for seq in seqs]
    assert [outcome.error for outcome in outcomes] == [None] * len(seqs)
    return [outcome.result for outcome in outcomes]


def undisturbed(
    make: Callable[..., Here], *seqs: int, save: int | None = None
) -> tuple[list[object], dict[str, Tensor]]:
    """What steps that begin with these come to where no worker dies, and the model after them.

    A save ends before anything behind it.
    """
    other = make("undisturbed")
    for seq in seqs:
        step(other, seq)
        if seq + 2 == save:
            other.save("a", save, "kept")
            other.settle()
    return results(other, *(each for seq in seqs for each in (seq, seq + 1))), state(other)


# ---- What comes back


@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_comes_back_as_its_last_step_left_it(make: Callable[..., Here], steps: int) -> None:
    """Weights and optimizer to the last bit, and what follows is what would have followed."""
    here = make()
    seqs = [1 + 2 * number for number in range(steps + 2)]
    for seq in seqs[:steps]:
        step(here, seq)
    before = state(here)
    die(here)
    here.settle()
    assert_same(state(here), before)
    for seq in seqs[steps:]:
        step(here, seq)
    expected, after = undisturbed(make, *seqs)
    assert results(here, *(each for seq in seqs for each in (seq, seq + 1))) == expected
    assert_same(state(here), after)
    assert copies(here) == [seqs[-2] + 1, seqs[-1] + 1]
    here.store.finish_session("s", "client", None)
    here.say(EndSession("s", save=False))
    here.settle()
    assert copies(here) == []  # they go with their model


@pytest.mark.parametrize(("how", "optimizer"), [("load_weights", False), ("create_from_checkpoint", True)])
def test_a_model_that_was_loaded_and_not_stepped_is_loaded_again(here: Here, how: str, optimizer: bool) -> None:
    step(here, 1)
    here.save("a", 3, "kept")
    here.settle()
    body = {"path": "tinker://s:train:a/weights/kept", "optimizer": optimizer}
    if how == "load_weights":
        here.create("b")
        here.add("b", 1, "load_weights", {"model_id": "s:train:b", "seq_id": 1} | body)
    else:
        body |= {"session_id": "s", "model_seq_id": 1}
        here.add("b", 0, "create_from_checkpoint", body, model=Model("s:train:b", "s", "tiny", {"rank": 4}, {}, None))
    here.settle()
    before = state(here, "b")
    assert (len(before) > len(here.backend().optimizers["s:train:b"].weights.named_tensors())) == optimizer
    die(here)
    here.settle()
    assert_same(state(here, "b"), before)


@pytest.mark.parametrize("kept_copies_gib", [32.0, 0.0])
def test_full_weights_come_back_from_a_copy_or_from_their_last_save(
    make: Callable[..., Here], kept_copies_gib: float
) -> None:
    here = make(kept_copies_gib=kept_copies_gib)
    another(here, "b", rank=0)
    step(here, 1, "b")
    here.save("b", 3, "kept")
    here.settle()
    step(here, 4, "b")
    before = state(here, "b")
    die(here)
    here.settle()
    assert_same(state(here, "b"), before)
    step(here, 6, "b")
    assert here.error("b", 7) is None


def test_a_model_without_copies_whose_replay_would_take_too_long_is_lost_and_named_with_its_newest_checkpoint(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make(kept_copies_gib=0)
    for seq, name in ((1, "older"), (2, "newest")):
        here.save("a", seq, name)
    another(here, "b", "c")
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.copies.MOST_REPLAYED_S", 0.0)
        step(here, 3)
        step(here, 1, "b")
    assert stored_requests(here) == 0 or here.engine.scheduler.models.loaded["s:train:a"].history.kept == []
    here.process.is_stuck = True
    for model, seq in (("a", 5), ("b", 3)):
        here.forward(model, seq, [30, 30])
        here.optim(model, seq + 1)
    here.until(lambda: here.process.passes)
    here.process.die(REASON)
    here.turn()
    assert [message.reason for message in here.said if isinstance(message, Recovering)] == [REASON]
    reason = f"{REASON}, and there is no copy of the model (--kept-copies-gib); "
    newest, none = "tinker://s:train:a/weights/newest", "it has no checkpoint to go on from"
    for model, seq, goes_on in (("a", 5, newest), ("a", 6, newest), ("b", 3, none), ("b", 4, none)):
        failed = here.outcome(model, seq)
        assert (failed.category, str(failed.error).startswith(reason), goes_on in str(failed.error)) == (
            "server",
            True,
            True,
        )
        assert f"s:train:{model}/{seq}" in here.told
    assert (models(here), here.engine.log_reader.filed) == (["c"], {})
    assert stored_requests(here) == 0
    here.process.is_stuck = False
    here.new_worker()
    here.settle()
    step(here, 1, "c")
    assert here.error("c", 2) is None


def test_a_given_up_history_begins_anew_with_a_save_of_a_whole_state(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a save behind open gradients that are forgotten the next step could not be replayed."""
    here = make(kept_copies_gib=0)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.copies.MOST_REPLAYED_S", 0.0)
        here.forward("a", 1, LENGTHS)
        here.settle()
    history = here.engine.scheduler.models.loaded["s:train:a"].history
    here.save("a", 2, "open")
    here.settle()
    assert history.kept == []
    here.optim("a", 3, learning_rate=0.1)
    here.save("a", 4, "whole")
    here.settle()
    assert len(history.kept) == 1
    step(here, 5)
    before = state(here)
    die(here)
    here.settle()
    assert_same(state(here), before)


# ---- What is replayed


def stored_requests(here: Here) -> int:
    """Finished operations whose requests the log has."""
    with here.store.reading() as connection:
        finished = commands.c.status != "queued", commands.c.payload.is_not(None)
        return len(connection.execute(select(commands.c.id).where(*finished)).all())


def test_what_came_since_the_last_copy_is_replayed_in_the_same_passes_and_not_recorded_again(
    make: Callable[..., Here],
) -> None:
    """Steps, an open step of several passes, and an operation of which one pass is computed."""
    here = make(replay_s=1000.0)
    another(here, "b")
    for seq in (1, 3):
        step(here, seq)
        step(here, seq, "b")
    here.forward("a", 5, LENGTHS, target=2)  # two passes
    here.settle()
    here.process.is_stuck = True
    here.forward("a", 6, LENGTHS, target=3)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.worker.turn()
    here.turn()
    (begun,) = here.engine.scheduler.forward.operations["s:train:a"]
    assert (len(begun.results), len(begun.in_pass)) == (2, 1)
    passes, told = (
        [each.lengths for each in here.process.passes if each.pieces[0][0].startswith("s:train:a/")],
        here.told,
    )
    here.told = []
    before, of_b = stored_requests(here), state(here, "b")
    here.process.passes.clear()
    die(here)
    here.settle()
    replayed = [each.lengths for each in here.process.passes if each.pieces[0][0].startswith("s:train:a/")]
    assert replayed == passes
    assert here.told == ["s:train:a/6"]
    assert copies(here) == []
    assert stored_requests(here) == before + 1 == 6
    assert_same(state(here, "b"), of_b)
    here.optim("a", 7, learning_rate=0.1)
    step(here, 8)
    other = make("undisturbed")
    for seq in (1, 3):
        step(other, seq)
    for seq, target in ((5, 2), (6, 3)):
        other.forward("a", seq, LENGTHS, target=target)
        other.settle()
    other.optim("a", 7, learning_rate=0.1)
    step(other, 8)
    assert results(here, *range(1, 10)) == results(other, *range(1, 10))
    assert_same(state(here), state(other))
    assert len(told) == len(set(told))
    assert here.worker.passes.datums == {}


def test_operations_that_shared_a_pass_share_it_again(make: Callable[..., Here]) -> None:
    """Each alone would round otherwise."""
    here = make(replay_s=1000.0)
    for seq in (1, 2, 3):
        here.forward("a", seq, [20], target=seq)
    here.settle()
    lengths = [each.lengths for each in here.process.passes]
    assert lengths == [[20, 20, 20]]
    here.process.passes.clear()
    die(here)
    here.settle()
    assert [each.lengths for each in here.process.passes] == lengths
    here.optim("a", 4, learning_rate=0.1)
    here.settle()
    assert results(here, 1, 2, 3, 4)


def test_a_refused_step_and_what_failed_before_it_are_not_replayed(make: Callable[..., Here]) -> None:
    here = make(replay_s=1000.0)
    step(here, 1)
    here.forward("a", 3, LENGTHS)
    here.add("a", 4, "forward_backward", b"no protobuf")
    here.settle()
    here.forward("a", 5, LENGTHS)
    here.settle()
    die(here)
    here.optim("a", 6)
    here.settle()
    assert "seq_id 4" in str(here.error("a", 6))
    before = state(here)
    here.process.passes.clear()
    die(here)
    here.settle()
    assert len(here.process.passes) == 2  # those of the first step
    assert_same(state(here), before)
    step(here, 7)
    other = make("undisturbed")
    step(other, 1)
    for seq in (3, 4, 5, 6):
        other.optim("a", seq)  # without gradients
    step(other, 7)
    assert results(here, 1, 2, 7, 8) == results(other, 1, 2, 7, 8)
    assert_same(state(here), state(other))


def test_copies_come_when_a_replay_of_all_models_would_take_as_long_as_it_may(make: Callable[..., Here]) -> None:
    here = make(replay_s=10.0)
    another(here, "b")
    histories = [here.engine.scheduler.models.loaded[f"s:train:{name}"].history for name in "ab"]
    step(here, 1)
    histories[0].seconds += 9.0
    step(here, 3)
    assert copies(here) == []
    histories[0].seconds += 1.0
    step(here, 5)
    assert copies(here) == [6]
    step(here, 1, "b")
    histories[0].seconds += 5.0  # now two may replay, and each has half of the time
    step(here, 7)
    assert copies(here) == [6, 8]


def test_a_long_replay_is_not_made_twice(make: Callable[..., Here]) -> None:
    here = make(replay_s=1000.0)
    step(here, 1)
    die(here)
    here.settle()
    history = here.engine.scheduler.models.loaded["s:train:a"].history
    assert 0 < history.replayed_s < 100
    step(here, 3)
    assert copies(here) == []
    history.replayed_s = 101.0
    history.wanted_s = history.seconds + 50.0
    step(here, 5)
    assert (copies(here), history.replayed_s) == ([6], 0.0)
    step(here, 7)
    assert copies(here) == [6]


def test_requests_stay_until_two_newer_copies_make_them_needless(make: Callable[..., Here]) -> None:
    here = make(replay_s=1000.0)
    for seq in (1, 3):
        step(here, seq)
    assert stored_requests(here) == 2
    history = here.engine.scheduler.models.loaded["s:train:a"].history
    history.seconds += 2000.0
    step(here, 5)
    assert (copies(here), stored_requests(here)) == ([6], 3)
    step(here, 7)
    history.seconds += 2000.0
    step(here, 9)
    assert (copies(here), stored_requests(here), len(history.events)) == ([6, 10], 2, 6)
    here.store.finish_session("s", "client", None)
    here.say(EndSession("s", save=False))
    here.settle()
    assert stored_requests(here) == 0


def test_a_model_whose_history_is_given_up_leaves_no_requests_in_the_log(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever save it, and the disk would fill."""
    here = make(kept_copies_gib=0)
    step(here, 1)
    assert stored_requests(here) == 1
    monkeypatch.setattr("tinsmith.engine.copies.MOST_REPLAYED_S", 0.0)
    for seq in (3, 5, 7):
        step(here, seq)
        assert stored_requests(here) == 0


def test_a_step_that_does_not_come_leaves_no_requests_and_no_history_and_is_refused_if_workers_end(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may take losses with forward_backward and never step: disk and memory would fill."""
    here = make(replay_s=1000.0)
    monkeypatch.setattr("tinsmith.engine.copies.MOST_OPEN", 3 * len(LENGTHS))
    step(here, 1)
    history = here.engine.scheduler.models.loaded["s:train:a"].history
    of_first = len(history.events)
    for seq in range(3, 9):
        here.forward("a", seq, LENGTHS)
        here.settle()
    assert (stored_requests(here), len(history.events)) == (1, of_first)
    before = state(here)
    die(here)
    here.optim("a", 9, learning_rate=0.1)
    here.settle()
    assert "its gradients are of too many datums to compute them again" in str(here.error("a", 9))
    assert_same(state(here), before)
    step(here, 10)
    assert results(here, 10, 11)


def test_a_step_that_cannot_be_replayed_is_copied_at_once(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make(replay_s=1000.0)
    monkeypatch.setattr("tinsmith.engine.copies.MOST_OPEN", len(LENGTHS))
    step(here, 1)
    assert copies(here) == []
    for seq in (3, 4):
        here.forward("a", seq, LENGTHS)
    here.settle()
    here.optim("a", 5, learning_rate=0.1)
    here.settle()
    assert (copies(here), stored_requests(here)) == ([5], 0)
    step(here, 6)
    before = state(here)
    die(here)
    here.settle()
    assert_same(state(here), before)
    other = make("undisturbed")
    step(other, 1)
    for seq in (3, 4):
        other.forward("a", seq, LENGTHS)
    other.settle()
    other.optim("a", 5, learning_rate=0.1)
    other.settle()
    step(other, 6)
    assert_same(state(here), state(other))


def test_a_spoiled_step_that_does_not_come_leaves_no_requests(make: Callable[..., Here]) -> None:
    here = make(replay_s=1000.0)
    here.add("a", 1, "forward_backward", b"no protobuf")
    here.settle()
    for seq in range(2, 5):
        here.forward("a", seq, LENGTHS)
        here.settle()
    assert stored_requests(here) == 0


def test_a_step_whose_replay_computes_other_gradients_loses_its_model(
    make: Callable[..., Here],
) -> None:
    """Nobody would see that it trains on from other weights."""
    here = make(replay_s=1000.0)
    step(here, 1)
    (event,) = [
        each for each in here.engine.scheduler.models.loaded["s:train:a"].history.events if isinstance(each, Stepped)
    ]
    object.__setattr__(event, "grad_norm", 2.0 * event.grad_norm)
    here.optim("a", 3)
    die(here)
    here.settle()
    assert "the replay of a step has computed other gradients" in str(here.error("a", 3))


def test_a_database_that_cannot_be_read_delays_the_replay(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make(replay_s=1000.0)
    step(here, 1)
    before, real, refused = state(here), here.store.payload, [1, 2]

    def payload(command: Command) -> bytes:
        if refused:
            refused.pop()
            raise StoreUnavailableError("the database is locked")
        return real(command)

    monkeypatch.setattr(here.store, "payload", payload)
    die(here)
    here.settle()
    assert (refused, models(here)) == ([], ["a"])
    assert_same(state(here), before)


# ---- What had begun


def test_what_was_under_way_goes_on_and_no_gradient_counts_twice(make: Callable[..., Here]) -> None:
    """Of a call that takes two passes one is computed: its gradients do not count twice."""
    here = make()
    step(here, 1)
    here.process.is_stuck = True
    here.forward("a", 3, LENGTHS, target=3)
    here.optim("a", 4, learning_rate=0.1)
    here.save("a", 5, "kept")
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.worker.turn()
    here.turn()
    (begun,) = here.engine.scheduler.forward.operations["s:train:a"]
    assert (len(begun.results), len(begun.in_pass)) == (2, 1)
    die(here)
    here.settle()
    expected, after = undisturbed(make, 1, 3)
    assert results(here, 1, 2, 3, 4) == expected
    assert_same(state(here), after)
    assert here.error("a", 5) is None


def test_what_is_computed_and_not_recorded_is_recorded(make: Callable[..., Here]) -> None:
    here = make()
    here.forward("a", 1, [4])
    here.until(lambda: here.engine.scheduler.forward.passes)
    while not any(isinstance(message, PassDone) for message in here.process.wire.sent):
        here.process.work()
    here.process.die(REASON)  # its last words arrive with the news of its end
    here.turn()
    assert here.store.status("s:train:a/1") == "done"
    here.new_worker()
    here.optim("a", 2)
    here.settle()
    assert [here.error("a", seq) for seq in (1, 2)] == [None, None]


@pytest.mark.parametrize("heard", [True, False])
def test_a_step_under_way_is_taken_once(make: Callable[..., Here], heard: bool) -> None:
    """The dead worker has taken the step, and kept a copy of it, but perhaps not said so."""
    here = make()
    step(here, 1)
    here.forward("a", 3, LENGTHS, target=3)
    here.until(lambda: "s:train:a/3" in here.told)
    here.optim("a", 4, learning_rate=0.1)
    here.until(lambda: here.engine.scheduler.models.running)
    while here.worker.copies.running or not any(isinstance(message, Answer) for message in here.process.wire.sent):
        here.process.work()
    if not heard:
        here.process.wire.taken()
    assert copies(here) == [2, 4]
    die(here)
    here.settle()
    expected, after = undisturbed(make, 1, 3)
    assert results(here, 1, 2, 3, 4) == expected
    assert_same(state(here), after)
    step(here, 5)
    assert copies(here) == [4, 6]


def test_operations_that_ended_between_others_are_not_waited_for(here: Here) -> None:
    here.process.is_stuck = True
    here.forward("a", 1, [4])
    here.add("a", 2, "forward_backward", b"no protobuf")
    here.forward("a", 3, [4])
    here.until(lambda: "s:train:a/2" in here.told)
    die(here)
    here.optim("a", 4)
    here.settle()
    assert results(here, 1, 3)
    assert "seq_id 2" in str(here.error("a", 4))


@pytest.mark.parametrize("replay_s", [0.0, 1000.0])
def test_published_weights_come_back_from_their_files_or_by_the_replay(
    make: Callable[..., Here], replay_s: float
) -> None:
    """Also those that were under way, and behind steps of which there are copies."""
    here = make(replay_s=replay_s)
    published: list[Tensor] = []
    for seq in (1, 4):
        publish(here, seq)
        here.settle()
        published.append(flat(here, f"s:train:a/{seq}"))
        step(here, seq + 1)
    here.process.is_stuck = True
    publish(here, 7)
    here.until(lambda: here.engine.scheduler.models.running)
    die(here)
    here.settle()
    assert results(here, 1, 4, 7)
    sessions = [here.store.sampling_session(f"s:sample:{seq}") for seq in (1, 4, 7)]
    assert [session.gone for session in sessions if session is not None] == [None] * 3
    assert [
        torch.equal(flat(here, f"s:train:a/{seq}"), before) for seq, before in zip((1, 4), published, strict=True)
    ] == [True] * 2
    assert here.worker.snapshots.find("tiny", "s:train:a/7") is not None
    assert not torch.equal(*published)


def publish(here: Here, seq: int) -> None:
    session = SamplingSession(f"s:sample:{seq}", "s", "tiny", f"s:train:a/{seq}", "s:train:a")
    body = {"model_id": "s:train:a", "seq_id": seq, "sampling_session_seq_id": seq}
    here.add("a", seq, "save_weights_for_sampler", body, sampling_session=session)


def flat(here: Here, snapshot_id: str) -> Tensor:
    """The weights of a snapshot, from memory or from its file."""
    snapshots = here.worker.snapshots
    weights = snapshots.find("tiny", snapshot_id) or snapshots.reader("tiny", snapshot_id)().weights
    return torch.cat([tensor.detach().flatten() for tensor in weights.named_tensors().values()])


def test_a_model_whose_session_ends_meanwhile_is_saved_when_it_is_back(here: Here) -> None:
    step(here, 1)
    here.process.is_stuck = True
    here.forward("a", 3, [4])
    here.until(lambda: here.process.passes)
    here.process.is_stuck = False
    here.process.die(REASON)
    here.turn()
    here.store.finish_session("s", "idle", None)
    here.say(EndSession("s", save=True))
    here.turn()
    here.new_worker()
    here.settle()
    assert "cancelled" in str(here.error("a", 3))
    assert here.store.checkpoint("tinker://s:train:a/weights/session-end") is not None
    assert models(here) == []


# ---- What ends workers again and again


def test_a_model_whose_comeback_ends_the_workers_again_is_lost_and_others_come_back(here: Here) -> None:
    another(here, "b")
    step(here, 1)
    step(here, 1, "b")
    here.save("a", 3, "kept")
    here.settle()
    crash_recovery = here.engine.scheduler.crash_recovery
    die(here)
    die_when(here, lambda: crash_recovery.under_way is not None and crash_recovery.under_way.model_id == "s:train:a")
    here.optim("a", 4)
    here.settle()
    lost = str(here.error("a", 4))
    assert "was lost" in lost or lost.startswith(f"{REASON} while the model was brought back, 3 times now; ")
    assert "newest checkpoint, tinker://s:train:a/weights/kept" in lost
    assert models(here) == ["b"]
    step(here, 3, "b")
    assert here.error("b", 4) is None
    assert copies(here) == []


def test_an_operation_that_ends_the_workers_again_fails_and_its_model_comes_back(here: Here) -> None:
    step(here, 1)
    before = state(here)
    here.forward("a", 3, [4])
    here.optim("a", 4)
    die_when(here, lambda: here.engine.scheduler.forward.passes)
    here.settle()
    failed = here.outcome("a", 3)
    assert (failed.error, failed.category) == (f"{REASON} while the operation was run, 3 times now", "server")
    assert "seq_id 3" in str(here.error("a", 4))
    assert_same(state(here), before)
    step(here, 5)
    assert results(here, 5, 6)
    assert not here.engine.scheduler.outcomes.suspects


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_copy_is_passed_over_and_two_lose_their_model_and_no_other(here: Here, damaged: int) -> None:
    another(here, "b")
    for model in "ab":
        for seq in (1, 3, 5):
            step(here, seq, model)
    before = state(here)
    assert copies(here) == [4, 6]
    for copy in ("6", "4")[:damaged]:
        file = kept_copies(Path(here.config.data_dir), "s:train:a") / copy / "adapter.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    die(here)
    here.settle()
    if damaged == 1:
        assert_same(state(here), before)
        step(here, 7)
        assert (copies(here), results(here, 7, 8) != []) == ([4, 8], True)
        return
    here.optim("a", 7)
    here.settle()
    assert "was lost when its worker" in str(here.error("a", 7))
    assert models(here) == ["b"]


@pytest.mark.parametrize("why", ["copies are damaged", "the replay differs"])
def test_a_model_that_does_not_come_back_leaves_nothing_of_an_operation_that_is_computed_in_part(
    make: Callable[..., Here], why: str
) -> None:
    """The rest of it would be computed by workers that do not have it."""
    here = make(replay_s=0.0 if why == "copies are damaged" else 1000.0)
    another(here, "b")
    for seq in (1, 3):
        step(here, seq)
    here.process.is_stuck = True
    here.forward("a", 5, LENGTHS)
    here.until(lambda: here.engine.scheduler.forward.passes)
    here.worker.turn()
    here.turn()
    assert len(here.engine.scheduler.forward.operations["s:train:a"][0].results) == 2
    for file in kept_copies(Path(here.config.data_dir), "s:train:a").glob("*/*.safetensors"):
        file.write_bytes(b"")
    for each in here.engine.scheduler.models.loaded["s:train:a"].history.events:
        if isinstance(each, Stepped):
            object.__setattr__(each, "grad_norm", 2.0 * each.grad_norm)
    die(here)
    here.settle()
    assert "the model could not be brought back" in str(here.error("a", 5))
    assert (models(here), here.worker.passes.datums) == (["b"], {})
    step(here, 1, "b")
    assert here.error("b", 2) is None


# ---- Creations, the database, samples


@pytest.fixture
def doomed(make: Callable[..., Here]) -> Here:
    """One model that would be lost, because what it has computed would take too long again."""
    made = make(kept_copies_gib=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith.engine.copies.MOST_REPLAYED_S", 0.0)
        step(made, 1)
    return made


@pytest.mark.parametrize("ends", [2, 3])
def test_a_model_in_the_making_is_made_by_the_next_workers_and_not_by_a_fourth(here: Here, ends: int) -> None:
    """It may be what ends them: every time, all other clients would lose their models."""
    here.create("b")
    here.forward("b", 1, [4])
    die_when(here, lambda: "s:train:b" in here.engine.scheduler.models.running, ends)
    here.create("d")
    here.settle()
    assert here.error("d", 0) is None
    assert not here.engine.scheduler.outcomes.suspects
    if ends == 2:
        assert [here.error("b", seq) for seq in (0, 1)] == [None, None]
        assert "s:train:b" in here.backend().optimizers
    else:
        failed = here.outcome("b", 0)
        assert (failed.error, failed.category) == (
            f"{REASON} while the operation was run, 3 times now",
            "server",
        )
        assert "model s:train:b is not loaded" in str(here.error("b", 1))


def test_a_locked_database_hears_of_the_loss_later_and_work_begins_only_then(doomed: Here) -> None:
    """Also if the next worker ends before."""
    here = doomed
    another(here, "c")  # which comes back, as it has not been stepped
    here.said.clear()
    here.process.is_stuck = True
    here.optim("a", 3)
    here.until(lambda: here.engine.scheduler.models.running)
    here.create("b")
    here.optim("a", 4)
    here.process.is_stuck = False
    names = [f"s:train:{name}" for name in ("a/3", "a/4", "b/0")]
    for _ in range(2):
        here.process.die(REASON)
        with here.locked():
            here.turn()
            assert here.engine.has_lost
        here.new_worker()
        with here.locked():
            for _ in range(3):
                here.turn()
            assert here.engine.scheduler.crash_recovery.under_way is None
    assert not any(isinstance(message, Ready) for message in here.said)
    assert [here.store.status(name) for name in names] == ["queued"] * 3
    assert here.backend().optimizers == {}
    here.settle()
    assert [str(here.error("a", seq)).startswith(REASON) for seq in (3, 4)] == [True, True]
    assert (here.error("b", 0), here.engine.patience() > 0) == (None, True)
    assert here.backend().optimizers.keys() == {"s:train:b", "s:train:c"}
    assert "s:train:a" not in here.engine.scheduler.models  # nothing of it is left to be called overdue
    told = [message for message in here.said if isinstance(message, Done | Ready)]
    order = [message.request_id if isinstance(message, Done) else "ready" for message in told]
    assert (sorted(order), order.index(names[0]) < order.index("ready")) == (sorted([*names, "ready"]), True)


def test_samples_that_come_while_no_worker_is_there_are_covered_by_the_message_that_it_ended(here: Here) -> None:
    """Once told, the server loses all samples, also those sent since; their clients send them again."""
    here.process.die(REASON)
    here.turn()
    here.say(Sample("s:sample:0/0", 1, "tiny", None, 1, False, b"{}"))
    here.turn()
    assert [message for message in here.said if isinstance(message, Recovering)] == [Recovering(REASON)]
    assert not any(isinstance(message, SampleFailed) for message in here.said)
    here.new_worker()
    here.settle()
    assert not here.worker.samples.has_work
