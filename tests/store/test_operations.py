"""The command log as pages show it, and what is kept of a run for its curves."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.databases import run_sql
from tinsmith.store import operations
from tinsmith.store.commands import FIRST_REQUEST_BYTES, FIRST_REQUESTS
from tinsmith.store.operations import (
    find_operation,
    last_metrics,
    list_operations,
    queued_operations,
    read_first_requests,
    read_metrics,
)
from tinsmith.store.records import Model, NewCommand, OperationMetrics, Outcome
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")

DESCRIPTION: dict[str, Any] = {
    "tags": [],
    "user_metadata": None,
    "sdk_version": "0",
    "project_id": None,
    "display_name": None,
}


def run_of(store: Store, session: str, tenant: str) -> str:
    """The id of a new run, with its create_model done."""
    store.create_session(session, DESCRIPTION, tenant)
    model = Model(f"{session}:train:0", session, "tiny", {"rank": 8}, {"type": "adamw"}, None)
    store.append([NewCommand(model.model_id, 0, "create_model", b"", model=model)])
    store.record([Outcome(f"{model.model_id}/0", b"{}", "json", None, None)])
    return model.model_id


def append(store: Store, model_id: str, *seq_ids: int, kind: Any = "forward_backward", payload: bytes = b"x") -> None:
    store.append([NewCommand(model_id, seq_id, kind, payload) for seq_id in seq_ids])


def done(model_id: str, seq_id: int, kind: str = "forward_backward", **metrics: float) -> Outcome:
    measured = OperationMetrics(kind, {name.replace("_sum", ":sum"): value for name, value in metrics.items()})
    return Outcome(f"{model_id}/{seq_id}", b"", "protobuf", None, None, tokens=7, measured=measured)


def test_metrics_come_with_their_outcome_and_go_with_their_run(store: Store, tmp_path: Path) -> None:
    run, other = run_of(store, "a", "local"), run_of(store, "b", "local")
    append(store, run, 1, 2)
    append(store, other, 1)
    store.record([done(run, 1, loss_sum=1 / 3), done(other, 1, loss_sum=5.0)])
    store.record([done(run, 1, loss_sum=9.0), done(run, 2, "optim_step", grad_norm=float("nan"))])
    rows = read_metrics(store, run)
    assert [(row.kind, row.tokens, json.loads(row.metrics)) for row in rows] == [
        ("forward_backward", 7, {"loss:sum": 0.3333333}),
        ("optim_step", 7, {"grad_norm": "nan"}),
    ]
    assert read_metrics(store, run, rows[0].number) == rows[1:]
    assert {
        name: json.loads(row.metrics) for name, row in last_metrics(store, [run, other], "forward_backward").items()
    } == {
        run: {"loss:sum": 0.3333333},
        other: {"loss:sum": 5.0},
    }
    store.finish_session("a", "success", None)
    store.drop_results(2e9, 2e9)
    assert len(read_metrics(store, run)) == 2
    store.forget_ended(2e9)
    assert read_metrics(store, run) == []
    assert len(read_metrics(store, other)) == 1
    assert run_sql(tmp_path, "SELECT count(*) FROM first_requests WHERE model_id = 'a:train:0'") == [(0,)]


def test_the_requests_of_the_first_passes_stay(store: Store) -> None:
    run = run_of(store, "a", "local")
    large = b"y" * (FIRST_REQUEST_BYTES + 1)
    append(store, run, 1, payload=large)
    append(store, run, 2, 4, 5, payload=b"seen")
    append(store, run, 3, kind="optim_step")
    store.record([done(run, 1), done(run, 2), Outcome(f"{run}/3", b"{}", "json", None, None)])
    store.record([done(run, 4), done(run, 5)])
    assert read_first_requests(store, run) == [(2, b"seen"), (4, b"seen")]
    assert FIRST_REQUESTS == 2


def test_a_store_that_is_told_to_keep_no_first_request_keeps_none(store: Store, tmp_path: Path) -> None:
    run = run_of(store, "a", "local")
    append(store, run, 1, 2, payload=b"seen")
    with closing(Store.open(tmp_path, first_requests=0)) as other:
        other.record([done(run, 1)])
        assert read_first_requests(other, run) == []
    store.record([done(run, 2)])
    assert read_first_requests(store, run) == [(2, b"seen")]


def test_queued_operations_have_their_position_among_those_of_all(store: Store) -> None:
    own, foreign = run_of(store, "a", "alice"), run_of(store, "b", "bob")
    append(store, foreign, 1)
    append(store, own, 1, 2)
    found, count = queued_operations(store, "alice", 1)
    assert [(each.position, each.seq_id, each.tenant) for each in found] == [(2, 1, "alice")]
    assert count == 2
    assert queued_operations(store, None, 9)[1] == 3
    store.record([done(foreign, 1)])
    assert [each.position for each in queued_operations(store, "alice", 9)[0]] == [1, 2]


def test_the_log_is_searched_by_run_kind_and_state(store: Store) -> None:
    run, foreign = run_of(store, "a", "alice"), run_of(store, "b", "bob")
    append(store, run, 1, 2, 3)
    append(store, foreign, 1)
    failed = Outcome(f"{run}/2", None, None, "too long", "user")
    store.record([done(run, 1), failed, done(foreign, 1)])
    own = partial(found, store, "alice")
    assert own() == [3, 2, 1, 0]
    assert own(status="done") == [1, 0]
    assert own(status="queued") == [3]
    assert own(status="failed") == [2]
    assert found(store, "bob", status="failed") == []
    assert [each.kind for each in list_operations(store, None, 9, kind="create_model").operations] == [
        "create_model"
    ] * 2
    assert {each.model_id for each in list_operations(store, None, 9, model_id=foreign).operations} == {foreign}
    assert own(model_id=foreign) == []
    (failure,) = list_operations(store, "alice", 9, status="failed").operations
    assert failure.error == "too long"
    assert find_operation(store, run, 2).request_id == f"{run}/2"


def found(store: Store, tenant: str | None, **wanted: Any) -> list[int]:
    return [each.seq_id for each in list_operations(store, tenant, 9, **wanted).operations]


@pytest.mark.parametrize("wanted", [{}, {"status": "done"}, {"kind": "forward_backward"}, {"model_id": "a:train:0"}])
def test_a_search_of_a_long_log_goes_on_where_it_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    """Invariant: One search of the log looks at so many operations, however long it is, and none is passed over."""
    monkeypatch.setattr(operations, "MOST_SEARCHED", 5)
    run, foreign = run_of(store, "a", "alice"), run_of(store, "b", "bob")
    for number in range(1, 21):
        append(store, run if number % 7 == 0 else foreign, number)
    store.record([done(run, number) for number in (7, 14)])
    for tenant, limit in (("alice", 9), ("alice", 1), (None, 2)):
        seen, before, searches = list[tuple[str, int]](), None, 0
        while searches == 0 or before is not None:
            part = list_operations(store, tenant, limit, before, **wanted)
            assert part.older is None or before is None or part.older < before
            seen += [(each.model_id, each.seq_id) for each in part.operations]
            before, searches = part.older, searches + 1
        every = list_operations(store, tenant, 99, **wanted)
        monkeypatch.setattr(operations, "MOST_SEARCHED", 1000)
        whole = list_operations(store, tenant, 99, **wanted)
        monkeypatch.setattr(operations, "MOST_SEARCHED", 5)
        assert seen == [(each.model_id, each.seq_id) for each in whole.operations]
        assert len(every.operations) <= 5
        assert whole.older is None


def test_failures_are_found_behind_many_that_did_not_fail(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_SEARCHED", 3)
    run = run_of(store, "a", "alice")
    append(store, run, *range(1, 20))
    store.record([Outcome(f"{run}/1", None, None, "too long", "user"), *(done(run, each) for each in range(2, 20))])
    assert found(store, "alice", status="failed") == [1]
    assert found(store, None, status="queued") == []
