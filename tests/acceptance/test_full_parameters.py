"""Full-parameter training through the SDK, which asks for it with rank 0.

How it is saved and leaves is in `test_exchange.py`.
"""

import numpy as np
import tinker

from tests.acceptance.talking import datum, image_input, learn, numbers, scores, text_input, train, with_inputs
from tests.acceptance.test_sampling import assert_sampled_as_trained, sampling_client


def test_it_is_sampled_as_trained_and_nobody_else_changes(service: tinker.ServiceClient) -> None:
    prompt = text_input(1, 8)
    base = service.create_sampling_client(base_model="vision").result()
    neighbour = learn(train(service, "vision"), [datum(prompt)])
    scored = with_inputs(prompt, target_tokens=[*prompt.to_ints()[1:], 0], weights=[1.0] * 8)
    client = train(service, "vision", rank=0)
    assert (client.get_info().is_lora, client.get_info().lora_rank) == (False, None)
    data = [datum(text_input(0, 9)), datum(image_input(client, 1))]
    before = [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()]
    early = sampling_client(client)
    assert early.compute_logprobs(prompt).result() == before[0]

    sampler = sampling_client(learn(client, data))
    for each in (prompt, image_input(client, 2)):
        assert_sampled_as_trained(client, sampler, each)
    late = sampler.compute_logprobs(prompt).result()
    learn(client, data)
    assert sampler.compute_logprobs(prompt).result() == late
    assert early.compute_logprobs(prompt).result() == before[0]
    assert np.abs(numbers(late[1:]) - numbers(before[0][1:])).max() > 0.01
    assert [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()] == before
