"""Disks that fill up while operations run: engine, worker and server live on, and each operation counts once."""

import resource
from pathlib import Path

import httpx
import numpy as np

from tests.acceptance.conftest import connect, ready
from tests.acceptance.raw import GOOD, RawModel
from tests.acceptance.talking import RAW_STEP, datum, scores, text_input, train
from tests.running import Server

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


def test_a_disk_without_room_fails_the_save_and_nothing_else(server: Server, http: httpx.Client) -> None:
    model, worker = RawModel(http, "text", rank=256), server.worker_pid()
    model.forward_backward(1, GOOD)
    model.optim_step(2, RAW_STEP)
    expected, (_, hard) = model.scores(3), resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (6 * 2**20, hard))
    failed = model.result(model.save(4, "none"))
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (hard, hard))
    assert (failed["category"], "could not be written" in str(failed["error"])) == ("server", True)
    assert model.scores(5) == expected
    saved = model.result(model.save(6, "none"))
    assert RawModel(http, "text", path=str(saved["path"])).scores(1) == expected
    assert list((server.log.parent / "data" / "checkpoints").glob(".*")) == []
