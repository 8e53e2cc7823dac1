"""The journal of a model's history: what is read from the database is what was written to it.

Invariant: What the next engine reads of a model is what the engine before had recorded of it, to the last event.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.history import CopiedForSave, Event, Fresh, History, Kept, Mark, Passed, Published, Saved, Stepped
from tinsmith.engine.journal import change_of, restored
from tinsmith.engine.model_state import LoadedModel, ModelState
from tinsmith.engine.passes import ForwardOperation
from tinsmith.errors import TinsmithError
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.records import CommandKind, Model, NewCommand, Outcome
from tinsmith.store.store import Store

MODEL = "s:train:0"
DESCRIPTION: dict[str, Any] = {
    "tags": [],
    "user_metadata": None,
    "sdk_version": "0",
    "project_id": None,
    "display_name": None,
}
KINDS: list[CommandKind] = [
    *("create_model", "forward_backward", "forward_backward", "save_weights", "optim_step", "forward_backward")
]
SEED = Fresh(LoraShape(4, 7, train_mlp=False), "f" * 64)
COPY = Saved("the kept copy", "/data/kept/3", optimizer=True, is_copy=True)


class Journal:
    """A model whose operations are in the log, and what an engine knows of it."""

    def __init__(self, data_dir: Path) -> None:
        self.store = Store.open(data_dir)
        self.store.create_session("s", DESCRIPTION)
        new = Model(MODEL, "s", "tiny", {}, {}, None)
        operations = [NewCommand(MODEL, seq, kind, b"{}") for seq, kind in enumerate(KINDS)]
        self.store.append([replace(operations[0], model=new), *operations[1:]])
        self.commands = self.store.queued(MODEL)
        self.model = LoadedModel(MODEL, "tiny", SEED.shape, History([Kept(SEED, Mark())]))
        self.record(0)

    @property
    def history(self) -> History:
        return self.model.history

    def record(self, seq: int, error: str | None = None) -> None:
        """Record how an operation ended, with what has changed."""
        change = change_of(self.model)
        category: Any = None if error is None else "user"
        outcome = Outcome(f"{MODEL}/{seq}", b"{}", "json", error, category, replays=seq in (1, 2), history=change)
        self.store.record([outcome])

    def read(self) -> tuple[ModelState, list[ForwardOperation], set[int]]:
        """What the next engine finds."""
        (stored,) = self.store.histories()
        return restored(stored)

    def require_same(self) -> tuple[ModelState, list[ForwardOperation], set[int]]:
        """What is read is what the engine knows, and nothing of it is written again."""
        state, forward, under_way = self.read()
        model = state.loaded
        assert model is not None
        assert vars(model) | {"history": None} == vars(self.model) | {"history": None}
        unwritten: dict[str, Any] = {"added": set(), "removed": set(), "_next": None, "copying": None}
        assert vars(model.history) | unwritten == vars(self.history) | unwritten
        assert change_of(model) is None
        return state, forward, under_way


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A model that was created."""
    return Journal(tmp_path)


def passed(journal: Journal, *pieces: tuple[int, int], **more: Any) -> Passed:
    """A pass of these datums: seq_id and index."""
    named = [(journal.commands[seq], index) for seq, index in pieces]
    lengths, pixels = [5] * len(pieces), [{"ab": 100}] * len(pieces)
    return replace(Passed(journal.history.state, named, lengths, pixels, together=False), **more)


def test_every_event_is_read_as_it_was_written(journal: Journal) -> None:
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1e30}
    events: list[Event] = [
        passed(journal, (1, 0), (1, 1)),
        passed(journal, (2, 0), together=True, routed=[3]),
        CopiedForSave(Mark(0, 0, 1.5), journal.commands[3]),
        Stepped(0, settings, 0.1 + 0.2),
        Published(1, f"{MODEL}/9", inflight=True),
    ]
    for event in events[:3]:
        journal.history.add(event)
    journal.model.added_seq, journal.history.seconds = 2, 1.5
    journal.record(1)
    journal.record(2)
    state, forward, under_way = journal.require_same()
    assert (forward, under_way, state.queue.next_seq) == ([], {3}, 4)
    assert isinstance(events[3], Stepped)
    journal.history.step(4, events[3])
    journal.history.add(events[4])
    journal.record(4)
    state, _, _ = journal.require_same()
    assert state.loaded is not None
    assert (state.loaded.history.events, state.queue.next_seq) == (events, 5)


def test_what_is_forgotten_is_deleted_and_what_no_replay_needs_is_released(journal: Journal) -> None:
    history = journal.history
    history.add(passed(journal, (1, 0)))
    journal.record(1)
    journal.model.spoil("seq_id 2: it was wrong")
    journal.record(2, "it was wrong")
    state, _, _ = journal.require_same()
    assert state.loaded is not None
    assert (state.loaded.history.events, state.loaded.spoiled) == ([], "seq_id 2: it was wrong")
    history.step(4, Stepped(0, {}, 1.0))
    journal.record(4)
    for source in (COPY, replace(COPY, directory="/data/kept/4")):
        history.state += 1
        history.keep(Kept(source, Mark(history.state, 4, 9.0)))
    change = change_of(journal.model)
    assert change is not None
    assert (change.removed, change.released) == ([1], [(0, 4)])
    journal.store.record([change])
    journal.require_same()
    with pytest.raises(TinsmithError, match="is dropped"):
        journal.store.payload(journal.commands[1])


def test_a_model_without_a_state_is_not_in_the_journal_until_it_has_one_again(journal: Journal) -> None:
    journal.history.add(passed(journal, (1, 0)))
    journal.history.give_up()
    journal.record(1)
    assert journal.store.histories() == []
    journal.history.step(4, Stepped(0, {}, 1.0))
    journal.record(4)
    assert journal.store.histories() == []
    journal.history.keep(Kept(COPY, journal.history.mark()))
    change = change_of(journal.model)
    assert change is not None
    journal.store.record([change])
    journal.require_same()


def test_operations_whose_datums_are_in_a_recorded_pass_go_on_behind_them(journal: Journal) -> None:
    """Those that have not begun, and came before what has ended, are queued again."""
    journal.history.add(passed(journal, (1, 0), (2, 0)))
    journal.record(1)
    state, forward, under_way = journal.require_same()
    assert [(each.command, each.in_journal) for each in forward] == [(journal.commands[2], {0})]
    assert (under_way, state.queue.next_seq) == ({2}, 3)


def test_an_operation_that_ended_behind_others_leaves_these_in_the_queue(journal: Journal) -> None:
    journal.model.spoil("seq_id 2: it was wrong")
    journal.record(2, "it was wrong")
    state, forward, under_way = journal.require_same()
    assert (forward, under_way, state.queue.next_seq, state.queue.ended) == ([], set(), 1, {2})


def test_a_journal_that_lacks_an_operation_is_refused(journal: Journal) -> None:
    """Of a step that was not recorded, though what came behind it was, nobody knows whether it was taken."""
    journal.record(5)
    with pytest.raises(TinsmithError, match="s:train:0/3 has not ended, and operations behind it have"):
        journal.read()


def test_a_step_whose_passes_were_given_up_is_refused_by_the_next_engine(journal: Journal) -> None:
    """Its requests leave the log at once, and so do those of what still comes."""
    journal.history.add_pass(passed(journal, (1, 0), (1, 1)))
    journal.model.added_seq = 1
    journal.record(1)
    journal.history.give_up_open_step(journal.model.added_seq)
    change = change_of(journal.model)
    assert change is not None
    assert (change.removed, change.released) == ([0], [(0, 1)])
    journal.store.record([change])
    (stored,) = journal.store.histories()
    assert (stored.summary["open_is_given_up"], stored.events) == (True, {})
    state, _, _ = restored(stored)
    assert state.loaded is not None
    assert "too many datums to compute them again" in str(state.loaded.spoiled)
    assert (state.loaded.history.open_is_given_up, state.loaded.history.open_datums) == (False, 0)
