"""A real server, and the SDK, with the database in PostgreSQL, which is restarted under their feet.

Invariant: Over PostgreSQL too, every operation runs exactly once, whenever the database crashes or a connection breaks;
two servers never work on one database.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from tinker import APIFuture

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, scores, text_input, train
from tests.databases import PostgreSQL, running
from tests.extent import amount, slow
from tests.running import serving

ROUNDS = amount(4, 40)
LESSON, PROBE = [datum(text_input(1, 12), 1)], [datum(text_input(7, 12), 7)]


@pytest.fixture
def cluster() -> Iterator[PostgreSQL]:
    """A PostgreSQL that the test may restart."""
    with running() as started:
        yield started


@pytest.mark.parametrize("away_s", [0.0, *slow(35.0)])
def test_every_operation_counts_once_while_the_database_crashes(
    cluster: PostgreSQL, text_only: list[str], tmp_path: Path, away_s: float
) -> None:
    """It is back at once, or later than anybody waits for it."""
    name = cluster.new_database()
    with ready(tmp_path, *text_only, "--database-url", cluster.url(name)) as server, connect(server) as service:
        client, twin = train(service, "text"), train(service, "text")
        for _ in range(3 * ROUNDS):
            twin.forward_backward(LESSON, "cross_entropy")
            expected = twin.optim_step(RAW_STEP)
        expected.result()
        engine = server.engine_pid()
        for attempt in range(ROUNDS):
            submitted: list[APIFuture[Any]] = []
            for _ in range(3):
                submitted.append(client.forward_backward(LESSON, "cross_entropy"))
                submitted.append(client.optim_step(RAW_STEP))
            time.sleep(0.03 * attempt)
            cluster.restart(away_s if attempt == 1 else 0.0)
            for operation in submitted:
                operation.result()
        assert np.array_equal(scores(client, PROBE), scores(twin, PROBE))
        saved = client.save_state("a").result().path
        resumed = service.create_training_client_from_state(saved)
        assert np.array_equal(scores(resumed, PROBE), scores(twin, PROBE))
        assert server.engine_pid() == engine
    kinds = cluster.execute(
        "SELECT model_id, kind, status, count(*) FROM commands WHERE kind = 'optim_step' GROUP BY 1, 2, 3",
        database=name,
    )
    assert sorted(row[1:] for row in kinds) == [("optim_step", "done", 3 * ROUNDS)] * 2


END_ANY = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'tinsmith' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 2
"""


def test_every_operation_counts_once_while_connections_break(
    cluster: PostgreSQL, text_only: list[str], tmp_path: Path
) -> None:
    """At any moment: in a statement, in a commit, and behind it."""
    name = cluster.new_database()
    with ready(tmp_path, *text_only, "--database-url", cluster.url(name)) as server, connect(server) as service:
        client, twin = train(service, "text"), train(service, "text")
        ended = Event()

        def break_them() -> None:
            pause_s = 0.02
            while not ended.wait(pause_s):
                cluster.execute(END_ANY)
                pause_s *= 1.03  # so that a slow machine comes to an end of its transactions too

        with ThreadPoolExecutor(1) as breaking:
            running = breaking.submit(break_them)
            steps = [
                (client.forward_backward(LESSON, "cross_entropy"), client.optim_step(RAW_STEP))
                for _ in range(5 * ROUNDS)
            ]
            for passed, stepped in steps:
                passed.result()
                stepped.result()
            ended.set()
            running.result()
        for _ in range(5 * ROUNDS):
            twin.forward_backward(LESSON, "cross_entropy")
            stepped = twin.optim_step(RAW_STEP)
        stepped.result()
        assert np.array_equal(scores(client, PROBE), scores(twin, PROBE))
        used = cluster.execute("SELECT sum(trained_tokens) FROM usage", name)
        assert used == cluster.execute("SELECT sum(tokens) FROM commands", name)


def test_a_second_server_is_refused_until_the_first_is_killed(
    cluster: PostgreSQL, text_only: list[str], tmp_path: Path
) -> None:
    url = cluster.url(cluster.new_database())
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with ready(tmp_path / "first", *text_only, "--database-url", url) as first:
        with serving(tmp_path / "second", *text_only, "--database-url", url) as second:
            assert second.process.wait() == 2
        assert "is used by the server on " in second.log.read_text()
        first.process.kill()
        with ready(tmp_path / "second", *text_only) as second, connect(second) as service:
            client = train(service, "text")
            client.forward_backward(LESSON, "cross_entropy")
            assert client.optim_step(RAW_STEP).result().metrics is not None
