"""Disks that fill up while operations run: engine, worker and server live on, and each operation counts once."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import tinker

from tests.acceptance.raw import GOOD, RawModel
from tests.acceptance.talking import RAW_STEP, datum, scores, text_input, train
from tests.running import Server

LESSON, PROBE = [datum(text_input(1, 12), 1)], [datum(text_input(7, 12), 7)]


@contextmanager
def full_disk(pid: int, size: int) -> Iterator[None]:
    """No file of this process grows beyond that size."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def test_a_step_that_a_full_disk_keeps_from_being_recorded_counts_once(server: Server, service: tinker.ServiceClient) -> None:
    client, twin = train(service, "text"), train(service, "text")
    for submitted in twin.forward_backward(LESSON, "cross_entropy"), twin.optim_step(RAW_STEP):
        submitted.result()
    engine = server.engine_pid()
    size = (server.log.parent / "data" / "tinsmith.db-wal").stat().st_size  # what the server appends may still pass it
    waits = server.log.read_text().count("wait for the database")
    with full_disk(engine, size):
        passed, stepped = client.forward_backward(LESSON, "cross_entropy"), client.optim_step(RAW_STEP)
        while server.log.read_text().count("wait for the database") == waits:
            assert server.wait_for_health().status_code == 200
    assert len(passed.result().loss_fn_outputs) == 1
    assert stepped.result().metrics is not None
    assert server.engine_pid() == engine
    assert np.array_equal(scores(client, PROBE), scores(twin, PROBE))


def test_a_disk_without_room_fails_the_save_and_nothing_else(server: Server, http: httpx.Client) -> None:
    model = RawModel(http, "text", rank=256)
    model.forward_backward(1, GOOD)
    model.optim_step(2, RAW_STEP)
    expected = model.scores(3)
    with full_disk(server.worker_pid(), 6 * 2**20):
        failed = model.result(model.save(4, "none"))
    assert (failed["category"], "could not be written" in str(failed["error"])) == ("server", True)
    assert model.scores(5) == expected
    saved = model.result(model.save(6, "none"))
    assert RawModel(http, "text", path=str(saved["path"])).scores(1) == expected
    assert list((server.log.parent / "data" / "checkpoints").glob(".*")) == []
