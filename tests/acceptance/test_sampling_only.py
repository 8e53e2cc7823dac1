"""A server that only samples (--train none), beside the server that trains: it finds what that saves, and has the same numbers."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import datum, learn, numbers, text_input, train
from tests.acceptance.test_sampling import forward_logprobs
from tests.running import Server, serving

PARAMS = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])


@pytest.fixture(scope="module")
def sampling_server(server: Server, text_only: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the text model that may look into the checkpoints of the other one."""
    checkpoints = server.log.parent / "data" / "checkpoints"
    with serving(tmp_path_factory.mktemp("sampling"), *text_only, "--train", "none", "--checkpoint-root", str(checkpoints)) as running:
        running.wait_for_health()
        yield running


@pytest.mark.parametrize("rank", [8, 0])
def test_what_another_server_saves_is_sampled_with_the_trainers_numbers(
    rank: int, service: tinker.ServiceClient, sampling_server: Server
) -> None:
    """It was saved after the sampling server had started. The base model is sampled too, and has other numbers."""
    client = learn(train(service, "text", rank=rank), [datum(text_input(0, 9))])
    path = client.save_weights_for_sampler(f"shared-{rank}").result().path
    prompt = text_input(1, 6)
    with tinker.ServiceClient(base_url=sampling_server.url, api_key=API_KEY) as other:
        reply = other.create_sampling_client(model_path=path).result().sample(prompt, 2, PARAMS).result()
        bare = other.create_sampling_client(base_model="text").result().sample(prompt, 2, PARAMS).result()
    for sequence in reply.sequences:
        np.testing.assert_allclose(numbers(sequence.logprobs), forward_logprobs(client, prompt, list(sequence.tokens)), atol=1e-4)
    for sequence in bare.sequences:
        assert np.abs(numbers(sequence.logprobs) - forward_logprobs(client, prompt, list(sequence.tokens))).max() > 1e-2
