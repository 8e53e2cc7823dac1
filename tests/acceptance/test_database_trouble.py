"""A disk that fills up while operations run: engine and server live on, and each operation counts once.

Saves that a disk does not take are in `tests/engine/test_checkpoints.py` and `tests/distributed/test_saving_together.py`.
"""

import resource
from pathlib import Path

import numpy as np

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, scores, text_input, train

LESSON, PROBE = [datum(text_input(1, 12), 1)], [datum(text_input(7, 12), 7)]


def test_a_step_that_a_full_disk_keeps_from_being_recorded_counts_once(text_only: list[str], tmp_path: Path) -> None:
    with ready(tmp_path, *text_only) as server, connect(server) as service:
        client, twin = train(service, "text"), train(service, "text")
        for submitted in twin.forward_backward(LESSON, "cross_entropy"), twin.optim_step(RAW_STEP):
            submitted.result()
        engine = server.engine_pid()
        full = (tmp_path / "data" / "tinsmith.db-wal").stat().st_size  # what the server appends may still pass it
        _, hard = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (full, hard))
        passed, stepped = client.forward_backward(LESSON, "cross_entropy"), client.optim_step(RAW_STEP)
        server.wait_for_log("wait for the database")
        assert server.wait_for_health().status_code == 200
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (hard, hard))
        assert len(passed.result().loss_fn_outputs) == 1
        assert stepped.result().metrics is not None
        assert server.engine_pid() == engine
        assert np.array_equal(scores(client, PROBE), scores(twin, PROBE))
