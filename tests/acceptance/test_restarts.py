"""An engine that is killed, and a server that is killed and started again: what a client has, and what it waits for,
comes out the same.

A worker that is killed is in `test_worker_death.py`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import text_input, train
from tests.acceptance.test_checkpoints import sample_logprobs, steps
from tests.acceptance.test_stable_reinforce import policy_datum, sample

GONE = r"are gone: the server was restarted; publish weights again \(save_weights_and_get_sampling_client\)"


def samples_run(status: dict[str, Any]) -> bool:
    return bool(status["samples"]["running"])


def test_samples_checkpoints_and_recordings_outlive_engine_and_server(text_only: list[str], tmp_path: Path) -> None:
    """The SDK sends the samples again.

    A model goes on from its checkpoint, with what was sampled before; published weights are lost.
    """

    def ask() -> list[tinker.APIFuture[types.SampleResponse]]:
        params = types.SamplingParams(max_tokens=400, temperature=0.0, stop=[])
        return [base.sample(text_input(n, 5), 1, params) for n in range(2)]

    def tokens(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int]]:
        return [list(future.result().sequences[0].tokens) for future in futures]

    with ready(tmp_path, *text_only) as first:
        port = first.url.rpartition(":")[2]
        service = connect(first)
        base = service.create_sampling_client(base_model="text").result()
        expected, asked = tokens(ask()), ask()
        first.wait_for_status(samples_run)
        killed = first.engine_pid()
        os.kill(killed, signal.SIGKILL)
        assert tokens(asked) == expected
        while first.engine_pid() == killed:  # a model that is made before the server has seen it would end with it
            time.sleep(0.1)

        client = train(service, "text")
        steps(client, 0, 2)
        state, saved = client.save_state("x").result().path, client.save_weights_for_sampler("x").result().path
        of_saved = sample_logprobs(service.create_sampling_client(model_path=saved).result())
        published = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        recorded = [policy_datum(sample(published, [text_input(0, 5)])[0], 0)]
        metrics = client.forward(recorded, "stable_reinforce").result().metrics
        losses, asked = steps(client, 2, 2), ask()
        first.wait_for_status(samples_run)
        os.kill(first.pid, signal.SIGKILL)
        first.process.wait()
    with ready(tmp_path, *text_only, "--port", port):
        assert tokens(asked) == expected
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert resumed.forward(recorded, "stable_reinforce").result().metrics == pytest.approx(metrics)
        assert steps(resumed, 2, 2) == losses
        assert sample_logprobs(service.create_sampling_client(model_path=saved).result()) == of_saved
        with pytest.raises(tinker.NotFoundError, match=GONE):
            sample(published, [text_input(0, 5)])
        sample(resumed.save_weights_and_get_sampling_client(record_stability_info=True).result(), [text_input(0, 5)])
        service.close("success")
