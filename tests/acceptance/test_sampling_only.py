"""A server that only samples (--train none), beside the server that trains: it finds what that saves, and has the same
numbers."""

from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import datum, learn, numbers, text_input, train
from tests.acceptance.test_sampling import assert_sampled_as_trained, forward_logprobs
from tests.running import Server


def test_what_another_server_saves_is_sampled_with_the_trainers_numbers(
    service: tinker.ServiceClient, server: Server, text_only: list[str], tmp_path: Path
) -> None:
    """It was saved after the sampling server had started. The base model is sampled too, and has other numbers."""
    checkpoints, prompt = server.log.parent / "data" / "checkpoints", text_input(1, 6)
    with (
        ready(tmp_path, *text_only, "--train", "none", "--checkpoint-root", str(checkpoints)) as running,
        connect(running) as other,
    ):
        bare = other.create_sampling_client(base_model="text").result()
        (sequence,) = (
            bare.sample(prompt, 1, types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[]))
            .result()
            .sequences
        )
        for rank in (8, 0):
            client = learn(train(service, "text", rank=rank), [datum(text_input(0, 9))])
            path = client.save_weights_for_sampler(f"shared-{rank}").result().path
            assert_sampled_as_trained(client, other.create_sampling_client(model_path=path).result(), prompt)
            assert (
                np.abs(numbers(sequence.logprobs) - forward_logprobs(client, prompt, list(sequence.tokens))).max()
                > 1e-2
            )
