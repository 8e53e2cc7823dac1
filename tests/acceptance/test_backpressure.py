"""The real SDK against a server that cannot take more: it waits, sends the same seq_id again, and nothing is lost or done twice."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import grad_norm
from tests.running import serving


def heavy_datum() -> types.Datum:
    """Sixty-four tokens with 1.5 MB of targets."""
    targets = np.random.default_rng(0).integers(0, 2048, (64, 2000))
    weights = np.full(targets.shape, 1 / 2000, dtype=np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(64))),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)},
    )


def test_the_sdk_waits_when_too_much_is_queued_and_every_operation_runs_once(text_only: list[str], tmp_path: Path) -> None:
    options = [*text_only, "--max-queued-session-mib", "1"]
    with serving(tmp_path, *options) as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            training = service.create_lora_training_client("text", rank=4).result()
            one = training.forward_backward([heavy_datum()], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=0.0)).result()
            engine = server.engine_pid()
            os.kill(engine, signal.SIGSTOP)
            try:
                futures = [training.forward_backward([heavy_datum()], "cross_entropy") for _ in range(3)]
                step = training.optim_step(types.AdamParams(learning_rate=0.0))
                while "answered 429" not in server.log.read_text():
                    time.sleep(0.05)
            finally:
                os.kill(engine, signal.SIGCONT)
            assert [future.result().metrics["loss:sum"] for future in futures] == [one.metrics["loss:sum"]] * 3
            training.forward_backward([heavy_datum()], "cross_entropy").result()
            alone = grad_norm(training, types.AdamParams(learning_rate=0.0))
            np.testing.assert_allclose((step.result().metrics or {})["grad_norm"], 3 * alone, rtol=1e-5)
