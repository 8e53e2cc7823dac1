"""A disk that fills up while operations run: engine and server live on, and each operation counts once.

Saves that a disk does not take are in `tests/engine/test_checkpoints.py` and `tests/distributed/test_saving_together.py`.
"""

import resource

import numpy as np
import tinker

from tests.acceptance.talking import RAW_STEP, datum, scores, text_input, train
from tests.running import Server

LESSON, PROBE = [datum(text_input(1, 12), 1)], [datum(text_input(7, 12), 7)]


def test_a_step_that_a_full_disk_keeps_from_being_recorded_counts_once(server: Server, service: tinker.ServiceClient) -> None:
    client, twin = train(service, "text"), train(service, "text")
    for submitted in twin.forward_backward(LESSON, "cross_entropy"), twin.optim_step(RAW_STEP):
        submitted.result()
    engine, waits = server.engine_pid(), server.log.read_text().count("wait for the database")
    full = (server.log.parent / "data" / "tinsmith.db-wal").stat().st_size  # what the server appends may still pass it
    _, hard = resource.prlimit(engine, resource.RLIMIT_FSIZE)
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (full, hard))
    try:
        passed, stepped = client.forward_backward(LESSON, "cross_entropy"), client.optim_step(RAW_STEP)
        while server.log.read_text().count("wait for the database") == waits:
            assert server.wait_for_health().status_code == 200
    finally:
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (hard, hard))
    assert len(passed.result().loss_fn_outputs) == 1
    assert stepped.result().metrics is not None
    assert server.engine_pid() == engine
    assert np.array_equal(scores(client, PROBE), scores(twin, PROBE))
