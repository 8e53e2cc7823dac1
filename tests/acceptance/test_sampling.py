"""Samples through the SDK: the trainer's numbers, frozen snapshots, stop rules, seeds."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, scores, text_input, train, with_inputs


def sampling_client(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """A client of the model's weights as they are now."""
    sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()
    return sampler


def learn(client: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """One step that moves the weights visibly."""
    client.forward_backward(data, "cross_entropy")
    client.optim_step(RAW_STEP).result()


def forward_logprobs(client: tinker.TrainingClient, model_input: types.ModelInput, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probabilities of `tokens` after `model_input`."""
    whole = types.ModelInput(chunks=[*model_input.chunks, types.EncodedTextChunk(tokens=tokens)])
    targets = [0] * (model_input.length - 1) + tokens + [0]
    item = with_inputs(whole, target_tokens=targets, weights=[1.0] * whole.length)
    return scores(client, [item])[0][model_input.length - 1 : -1]


def test_logprobs_equal_forwards(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    learn(client, [datum(text_input(0, 9)), datum(image_input(client, 1))])
    sampler = sampling_client(client)
    for prompt in (text_input(1, 5), image_input(client, 2)):
        params = types.SamplingParams(max_tokens=15, temperature=1.0, stop=[])
        response = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
        for sequence in response.sequences:
            assert len(sequence.tokens) == 15
            expected = forward_logprobs(client, prompt, list(sequence.tokens))
            np.testing.assert_allclose(numbers(sequence.logprobs), expected, atol=1e-4)


def test_prompt_logprobs_with_an_image(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    prompt = image_input(client, 2)
    got = sampling_client(client).compute_logprobs(prompt).result()
    assert got[0] is None
    assert got[4:10] == [0.0] * 6
    tokens = [token for chunk in prompt.chunks if isinstance(chunk, types.EncodedTextChunk) for token in chunk.tokens]
    targets = tokens[1:4] + [0] * 6 + tokens[4:] + [0]
    item = with_inputs(prompt, target_tokens=targets, weights=[1.0] * prompt.length)
    expected = scores(client, [item])[0]
    np.testing.assert_allclose(numbers(got[1:4]), expected[:3], atol=1e-4)
    np.testing.assert_allclose(numbers(got[10:]), expected[9:-1], atol=1e-4)


def test_a_snapshot_stays_frozen_while_training_goes_on(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    prompt = text_input(1, 6)
    params = types.SamplingParams(max_tokens=10, seed=1, stop=[])
    samplers, before = [], []
    for step in range(3):
        samplers.append(sampling_client(client))
        before.append(samplers[-1].sample(prompt=prompt, num_samples=2, sampling_params=params).result())
        learn(client, [datum(text_input(step, 12), step)])
    assert before[0].sequences[0].logprobs != before[1].sequences[0].logprobs
    for sampler, first in zip(samplers, before, strict=True):
        again = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
        for old, new in zip(first.sequences, again.sequences, strict=True):
            assert list(new.tokens) == list(old.tokens)
            np.testing.assert_allclose(numbers(new.logprobs), numbers(old.logprobs), atol=1e-5)


def test_a_base_model_does_not_notice_training(service: tinker.ServiceClient) -> None:
    base: tinker.SamplingClient = service.create_sampling_client(base_model="text").result()
    prompt = text_input(1, 6)
    before = numbers(base.compute_logprobs(prompt).result())
    client = train(service, "text")
    learn(client, [datum(text_input(0, 12))])
    np.testing.assert_allclose(numbers(base.compute_logprobs(prompt).result()), before, atol=1e-5)
    trained = numbers(sampling_client(client).compute_logprobs(prompt).result())
    assert not np.allclose(trained, before, atol=1e-3, equal_nan=True)


def test_stop_rules(service: tinker.ServiceClient, family_dir: Callable[[str], Path]) -> None:
    decode = AutoTokenizer.from_pretrained(family_dir("qwen3")).decode
    sampler: tinker.SamplingClient = service.create_sampling_client(base_model="text").result()
    prompt = text_input(1, 6)

    def sample(stop: list[str] | list[int]) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=40, temperature=0.0, stop=stop)
        return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0]

    free = sample([])
    path = list(free.tokens)
    assert (len(path), free.stop_reason) == (40, "length")
    by_id = sample([path[3]])
    assert (list(by_id.tokens), by_id.stop_reason) == (path[: path.index(path[3]) + 1], "stop")
    text = str(decode(path[:3]))
    by_text = sample([text])
    assert by_text.stop_reason == "stop"
    assert text in decode(list(by_text.tokens))
    assert text not in decode(list(by_text.tokens)[:-1])


def test_seeds_are_reproducible_whatever_the_batch_mates(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    sampler = sampling_client(client)
    prompts = [text_input(0, 5), image_input(client, 1)]

    def sample(index: int, seed: int) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=seed, stop=[])
        response = sampler.sample(prompt=prompts[index], num_samples=2, sampling_params=params).result()
        return [list(sequence.tokens) for sequence in response.sequences]

    alone = [sample(index, 2**64 - 7 + index) for index in range(2)]
    assert alone[0][0] != alone[0][1]
    with ThreadPoolExecutor(16) as threads:
        crowd = [threads.submit(sample, i % 2, i) for i in range(14)]
        again = [threads.submit(sample, index, 2**64 - 7 + index) for index in range(2)]
        assert [future.result() for future in again] == alone
        assert len({str(future.result()) for future in crowd}) == 14


def test_a_repeated_asample_is_not_run_again(http: httpx.Client) -> None:
    session_id = http.post("create_session", json={}).json()["session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "text:peft:4096"}
    sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    ask = {"sampling_session_id": sampler, "seq_id": 5, "num_samples": 2, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
    first, second = http.post("asample", json=ask).json(), http.post("asample", json=ask).json()
    assert first == second
    assert len(set(first["sample_sequence_ids"])) == 2
    results = [http.post("retrieve_future", json={"request_id": first["request_id"]}).content for _ in range(2)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (types.ModelInput.from_ints([1, 5000]), {}, "5000; the vocabulary of text ends at 2047"),
        (types.ModelInput.from_ints([1]), {"max_tokens": 40_000}, r"1 \+ 40000 > 32768"),
        (types.ModelInput.from_ints([1]), {"top_p": 1.5}, "top_p"),
        (types.ModelInput.from_ints([1]), {"temperature": -1.0}, "temperature"),
        (types.ModelInput.empty(), {}, "the prompt is empty"),
    ],
)
def test_a_wrong_sample_is_refused_at_once(
    service: tinker.ServiceClient, prompt: types.ModelInput, params: dict[str, Any], message: str
) -> None:
    sampler: tinker.SamplingClient = service.create_sampling_client(base_model="text").result()
    with pytest.raises(Exception, match=message):
        sampler.sample(prompt=prompt, num_samples=1, sampling_params=types.SamplingParams(**params)).result()


def test_a_wrong_image_count_shows_both_numbers(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    good = image_input(client, 1)
    picture = good.chunks[1]
    assert isinstance(picture, types.ImageChunk)
    wrong = types.ModelInput(chunks=[types.ImageChunk(data=picture.data, format="png", expected_tokens=7)])
    with pytest.raises(tinker.RequestFailedError, match="expected_tokens is 7, but the image takes 6 tokens"):
        sampling_client(client).sample(prompt=wrong, num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)).result()
    with pytest.raises(tinker.RequestFailedError, match="datum 0: chunk 0: expected_tokens is 7, but the image takes 6 tokens"):
        client.forward([datum(wrong)], "cross_entropy").result()
