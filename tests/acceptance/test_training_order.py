"""However a client splits, reorders, retries or mixes its requests, the gradients are the same.

Invariant: However a call is split, cut, retried or reordered, gradients are the same.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.raw import RawModel
from tests.acceptance.talking import (
    RAW_STEP,
    assert_close,
    datum,
    image_input,
    logprobs,
    scores,
    text_input,
    train,
    with_inputs,
)
from tests.running import Server

Trace = tuple[float, list[np.ndarray], list[np.ndarray]]
"""Gradient norm, and log-probabilities before and after a step."""


def trace(client: tinker.TrainingClient, calls: Sequence[list[types.Datum]]) -> Trace:
    """One step made of these forward_backward calls."""
    futures = [client.forward_backward(call, "cross_entropy") for call in calls]
    step = client.optim_step(RAW_STEP)
    before = [array for future in futures for array in logprobs(future.result())]
    metrics = step.result().metrics
    assert metrics is not None
    return metrics["grad_norm"], before, scores(client, [item for call in calls for item in call])


def assert_same(actual: Trace, expected: Trace) -> None:
    """The same gradients; and they moved something."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(actual[1], expected[1], atol=1e-5)
    assert_close(actual[2], expected[2])
    assert np.abs(expected[2][0] - expected[1][0]).max() > 0.01


def test_one_call_split_into_many_gives_the_gradients_of_the_unsplit_one(
    service: tinker.ServiceClient, chunking_server: Server
) -> None:
    """Sequences of several lengths, every second of them with an image."""
    whole = train(service, "vision")
    lengths = [
        (datum(text_input(seed, 5 + 3 * seed), seed), datum(image_input(whole, seed), seed)) for seed in range(5)
    ]
    data = [item for pair in lengths for item in pair]
    expected = trace(whole, [data])
    with connect(chunking_server) as splitting:
        assert_same(trace(train(splitting, "vision"), [data]), expected)
    assert_same(trace(train(service, "vision"), [data[:3], data[3:4], data[4:]]), expected)


def test_sequence_ids_may_arrive_2_3_1_and_the_same_post_twice_counts_once(http: httpx.Client) -> None:
    data = [datum(text_input(seed, 6), seed) for seed in range(2)]
    ordered, shuffled = RawModel(http, "text"), RawModel(http, "text")
    for number in range(2):
        ordered.forward_backward(number + 1, data[number : number + 1])
    norm = ordered.grad_norm(ordered.optim_step(3, RAW_STEP))

    late = [shuffled.forward_backward(2, data[1:]) for _ in range(2)]
    steps = [shuffled.optim_step(3, RAW_STEP) for _ in range(2)]
    first = [shuffled.forward_backward(1, data[:1]) for _ in range(2)]
    assert [len(set(twice)) for twice in (first, late, steps)] == [1, 1, 1]
    assert shuffled.grad_norm(steps[0]) == pytest.approx(norm, rel=1e-5)
    found = logprobs(shuffled.output(first[0])) + logprobs(shuffled.output(late[0]))
    assert_close(
        found,
        [*logprobs(ordered.output(f"{ordered.model_id}/1")), *logprobs(ordered.output(f"{ordered.model_id}/2"))],
        1e-5,
    )
    # After it is done: the old result, not a new run
    again = logprobs(shuffled.output(shuffled.forward_backward(1, data[:1])))
    assert np.array_equal(again[0], found[0])
    assert shuffled.grad_norm(shuffled.optim_step(3, RAW_STEP)) == shuffled.grad_norm(steps[0])
    after = [[np.array(scores) for scores in model.scores(4, data)] for model in (ordered, shuffled)]
    assert_close(after[1], after[0])


def test_models_of_different_rank_that_train_at_once_equal_each_alone(service: tinker.ServiceClient) -> None:
    ranks = [4, 16, 8, 32]
    data = [[datum(text_input(10 * i + k, 5 + i + k), k) for k in range(3)] for i in range(4)]
    alone = [trace(train(service, "text", rank), [mine]) for rank, mine in zip(ranks, data, strict=True)]
    clients = [train(service, "text", rank) for rank in ranks]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(trace, clients, [[mine] for mine in data]))
    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)


def test_targets_of_two_dimensions_dense_and_sparse(service: tinker.ServiceClient) -> None:
    """(N, K) targets; the SDK sends the sparse one as CSR, with zeros dropped from targets and weights alike."""
    client, twin = train(service, "text"), train(service, "text")
    generator = np.random.default_rng(0)
    model_input = text_input(1, 12)
    targets = torch.from_numpy(generator.integers(1, 1500, (12, 40)))
    weights = torch.from_numpy(generator.normal(size=(12, 40)).astype(np.float32)) * (
        torch.rand(12, 40, generator=torch.Generator().manual_seed(0)) < 0.1
    )
    sparse_targets = torch.where(weights != 0, targets, 0)
    sparse = with_inputs(model_input, target_tokens=sparse_targets, weights=weights)
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    _, (got,), _ = result = trace(client, [[sparse]])
    assert got.shape == (12, 40)

    columns = [with_inputs(model_input, target_tokens=sparse_targets[:, k], weights=weights[:, k]) for k in range(40)]
    norm, by_column, after = trace(twin, [columns])
    np.testing.assert_allclose(got, np.stack(by_column, axis=1), atol=1e-5)
    assert result[0] == pytest.approx(norm, rel=1e-4)
    np.testing.assert_allclose(result[2][0], np.stack(after, axis=1), atol=1e-4)
