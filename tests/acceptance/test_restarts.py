"""An engine that is killed, and a server that is killed and started again: what a client has, and what it waits for,
comes out the same, and it only waits.

A worker that is killed is in `test_worker_death.py`, and an engine that dies at any write in
`tests/engine/test_engine_death.py`.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import datum, grad_norm, text_input, train
from tests.acceptance.test_checkpoints import sample_logprobs, steps
from tests.acceptance.test_stable_reinforce import policy_datum, sample
from tests.running import START_S

GONE = r"are gone: the server was restarted; publish weights again \(save_weights_and_get_sampling_client\)"


def samples_run(status: dict[str, Any]) -> bool:
    return bool(status["samples"]["running"])


def test_models_samples_and_recordings_outlive_engine_and_server(text_only: list[str], tmp_path: Path) -> None:
    """With open gradients, published weights and samples under way; the SDK sends the samples again.

    When the server is stopped, its models are saved, and published weights are gone.
    """

    def ask() -> list[tinker.APIFuture[types.SampleResponse]]:
        params = types.SamplingParams(max_tokens=400, temperature=0.0, stop=[])
        return [base.sample(text_input(n, 5), 1, params) for n in range(2)]

    def tokens(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int]]:
        return [list(future.result(timeout=START_S).sequences[0].tokens) for future in futures]

    def contribute(client: tinker.TrainingClient, seed: int) -> tinker.APIFuture[types.ForwardBackwardOutput]:
        return client.forward_backward([datum(text_input(seed, 12), seed)], "cross_entropy")

    with ready(tmp_path, *text_only) as server:
        port = server.url.rpartition(":")[2]
        service = connect(server)
        base = service.create_sampling_client(base_model="text").result()
        expected = tokens(ask())
        quiet, client = train(service, "text"), train(service, "text")
        assert steps(client, 0, 2) == steps(quiet, 0, 2)
        norms = []
        for seed in (7, 8):
            contribute(quiet, seed).result()
            norms.append(grad_norm(quiet))
        after = steps(quiet, 2, 2)

        published = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        of_published = sample_logprobs(published)
        recorded = [policy_datum(sample(published, [text_input(0, 5)])[0], 0)]
        metrics = client.forward(recorded, "stable_reinforce").result().metrics
        for seed, norm in zip((7, 8), norms, strict=True):
            contribute(client, seed).result()
            asked = ask()
            server.wait_for_status(samples_run)
            os.kill(server.engine_pid() if seed == 7 else server.pid, signal.SIGKILL)
            if seed == 8:
                server.start_again()
            assert grad_norm(client) == norm
            assert tokens(asked) == expected
            assert sample_logprobs(published) == of_published
        assert steps(client, 2, 2) == after
        assert client.forward(recorded, "stable_reinforce").result().metrics.keys() == metrics.keys()
        saved = client.save_state("x").result().path
        after = steps(client, 4, 2)
        assert "Traceback" not in server.log.read_text()
    with ready(tmp_path, *text_only, "--port", port):
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        assert steps(resumed, 4, 2) == after
        with pytest.raises(tinker.NotFoundError, match=GONE):
            sample(published, [text_input(0, 5)])
        sample(resumed.save_weights_and_get_sampling_client(record_stability_info=True).result(), [text_input(0, 5)])
        service.close("success")
