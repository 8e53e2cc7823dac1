"""Full-parameter training through the SDK, which asks for it with rank 0: trained, sampled, saved, resumed, exported."""

from pathlib import Path

import numpy as np
import tinker
from tinker import types
from transformers import AutoModelForCausalLM

from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import datum, image_input, learn, numbers, scores, text_input, train, with_inputs
from tests.acceptance.test_catalog import download
from tests.acceptance.test_sampling import forward_logprobs, sampling_client
from tests.running import Server, tinsmith_here


def test_it_is_sampled_as_trained_and_nobody_else_changes(service: tinker.ServiceClient) -> None:
    prompt = text_input(1, 8)
    base = service.create_sampling_client(base_model="vision").result()
    neighbour = train(service, "vision")
    learn(neighbour, [datum(prompt)])
    client = train(service, "vision", rank=0)
    assert (client.get_info().is_lora, client.get_info().lora_rank) == (False, None)
    data = [datum(text_input(0, 9)), datum(image_input(client, 1))]
    scored = with_inputs(prompt, target_tokens=[*prompt.to_ints()[1:], 0], weights=[1.0] * 8)
    before = [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()]
    early = sampling_client(client)
    assert early.compute_logprobs(prompt).result() == before[0]

    learn(client, data)
    sampler = sampling_client(client)
    for each in (prompt, image_input(client, 2)):
        params = types.SamplingParams(max_tokens=9, temperature=1.0, stop=[])
        for sequence in sampler.sample(prompt=each, num_samples=2, sampling_params=params).result().sequences:
            expected = forward_logprobs(client, each, list(sequence.tokens))
            np.testing.assert_allclose(numbers(sequence.logprobs), expected, atol=1e-4)
    late = sampler.compute_logprobs(prompt).result()
    learn(client, data)
    assert sampler.compute_logprobs(prompt).result() == late
    assert early.compute_logprobs(prompt).result() == before[0]
    assert np.abs(numbers(late[1:]) - numbers(before[0][1:])).max() > 0.01
    assert [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()] == before


def test_saved_weights_are_exported_and_downloaded_as_a_transformers_model(
    service: tinker.ServiceClient, rest: tinker.RestClient, server: Server, tmp_path: Path
) -> None:
    client = train(service, "text", rank=0)
    learn(client, [datum(text_input(0, 12))])
    expected = scores(client, [ITEM])[0]
    path = client.save_weights_for_sampler("out").result().path
    data = ["--data-dir", str(server.log.parent / "data")]
    refused = tinsmith_here("export", path, str(tmp_path / "out"), *data)
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "is of rank 0: all parameters were trained, and there is no adapter to write; add --merge" in refused.stderr
    done = tinsmith_here("export", path, str(tmp_path / "out"), "--merge", *data)
    assert done.returncode == 0, done.stderr
    files = download(rest, client.save_weights_external("full").result().path, tmp_path / "downloaded")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for directory in ("out", "downloaded"):
        network = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        np.testing.assert_allclose(transformers_logprobs(network), expected, atol=1e-4)
