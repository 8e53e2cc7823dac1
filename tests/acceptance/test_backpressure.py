"""The real SDK against a server that cannot take more: it waits, sends the same seq_id again, and nothing is lost or
done twice."""

import os
import signal
import time

import numpy as np
import pytest
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import grad_norm, train, with_inputs
from tests.running import Server

TARGETS = np.random.default_rng(0).integers(0, 2048, (16, 8000))
HEAVY = with_inputs(
    types.ModelInput.from_ints(list(range(16))),
    target_tokens=TARGETS,
    weights=np.full(TARGETS.shape, 1 / 8000, dtype=np.float32),
)
"""Sixteen tokens with 1.5 MB of targets."""
STAY = types.AdamParams(learning_rate=0.0)


def test_the_sdk_waits_when_too_much_is_queued_and_every_operation_runs_once(chunking_server: Server) -> None:
    with connect(chunking_server) as service:
        training = train(service, "text", rank=4)
        one = training.forward_backward([HEAVY], "cross_entropy").result()
        alone, refusals = grad_norm(training, STAY), chunking_server.log.read_text().count("answered 429")
        engine = chunking_server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            futures = [training.forward_backward([HEAVY], "cross_entropy") for _ in range(3)]
            step = training.optim_step(STAY)
            while chunking_server.log.read_text().count("answered 429") == refusals:
                time.sleep(0.05)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [future.result().metrics["loss:sum"] for future in futures] == [one.metrics["loss:sum"]] * 3
        assert (step.result().metrics or {})["grad_norm"] == pytest.approx(3 * alone, rel=1e-5)
