"""Checkpoints through the SDK: resumed runs, names and kinds of saved weights, a session that goes away.

Invariant: A resumed run gives the losses of an uninterrupted one, also on a new server; a checkpoint never changes.
Also: `tests/training/test_checkpoint.py`, `tests/acceptance/test_restarts.py`, `tests/acceptance/test_sampling.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import datum, numbers, scores, text_input, train

STEP = types.AdamParams(learning_rate=0.01, grad_clip_norm=0.5, weight_decay=0.1)
"""A step in which the moments, the step count and the clipping all matter."""


def steps(client: tinker.TrainingClient, first: int, count: int) -> list[float]:
    """Train on one datum a step; the losses."""
    losses = []
    for step in range(first, first + count):
        done = client.forward_backward([datum(text_input(step, 12), step)], "cross_entropy")
        client.optim_step(STEP).result()
        losses.append(done.result().metrics["loss:sum"])
    return losses


def sample_logprobs(sampler: tinker.SamplingClient) -> list[float]:
    """Log-probabilities of a fixed prompt."""
    return list(numbers(sampler.compute_logprobs(text_input(1, 8)).result()[1:]))


@pytest.mark.parametrize("rank", [8, 0])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(service: tinker.ServiceClient, rank: int) -> None:
    client = train(service, "text", rank)
    steps(client, 0, 3)
    path = client.save_state("three").result().path
    assert path == f"tinker://{client.model_id}/weights/three"
    uninterrupted = steps(client, 3, 3)
    assert steps(service.create_training_client_from_state_with_optimizer(path).result(), 3, 3) == uninterrupted
    weights_only = service.create_training_client_from_state(path).result()
    assert weights_only.get_info().lora_rank == (rank or None)
    fresh = steps(weights_only, 3, 3)
    assert fresh[0] == uninterrupted[0]
    assert fresh[1:] != uninterrupted[1:]
    older = train(service, "text", rank, seed=99)
    older.load_state_with_optimizer(path).result()
    assert steps(older, 3, 3) == uninterrupted


def test_names_are_taken_once(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    for save in (client.save_state, client.save_weights_for_sampler, client.save_weights_external):
        path = save("a").result().path
        with pytest.raises(tinker.RequestFailedError, match=f"{path} exists already; use another name"):
            save("a").result()
    before = scores(client, [datum(text_input(0, 8))])
    steps(client, 0, 2)
    trained = scores(client, [datum(text_input(0, 8))])
    first = client.save_state("a", overwrite=True).result().path
    loaded = scores(service.create_training_client_from_state(first).result(), [datum(text_input(0, 8))])
    assert loaded[0].tolist() == trained[0].tolist() != before[0].tolist()


def test_paths_of_the_wrong_kind_or_base_are_refused(service: tinker.ServiceClient) -> None:
    client, other_rank = train(service, "text"), train(service, "text", rank=4)
    training, sampling = client.save_state("k").result().path, client.save_weights_for_sampler("k").result().path
    external = client.save_weights_external("k").result().path
    steps(client, 0, 1)
    resume, sampler = service.create_training_client_from_state, service.create_sampling_client
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: resume(sampling), "these weights were saved for sampling"),
        (lambda: sampler(model_path=training), "these weights were saved for training"),
        (lambda: resume(external), "were saved to be downloaded"),
        (lambda: resume("tinker://x/weights/y"), "tinker://x/weights/y does not exist"),
        (lambda: resume(training, base_model="vision"), "'vision' is of architecture qwen3_vl, but tinker://"),
        (lambda: sampler(model_path=sampling, base_model="vision"), "of architecture qwen3_vl, but"),
        (lambda: client.load_state(training), "load_weights must be the first request of a model"),
        (lambda: other_rank.load_state(training), "rank=8, the model was created with rank=4; create one with rank=8 "),
    ]
    for attempt, reason in refusals:
        with pytest.raises(Exception, match=reason):
            attempt().result()


def test_a_session_that_goes_away_leaves_its_models_and_snapshots_come_back_from_disk(
    text_only: list[str], tmp_path: Path
) -> None:
    with ready(tmp_path, *text_only, "--session-idle-s", "8", "--snapshot-gib", "0") as running:
        client = train(connect(running), "text")
        samplers, before = [], []
        for step in range(2):
            steps(client, step, 1)
            samplers.append(client.save_weights_and_get_sampling_client().result())
            before.append(sample_logprobs(samplers[-1]))
        assert before[0] != before[1]
        assert [sample_logprobs(sampler) for sampler in samplers] == before
        path = client.save_state("here").result().path
        running.wait_for_status(lambda status: bool(status["models"]))  # it may be a second old
        running.wait_for_status(lambda status: not status["models"])
        kept = f"tinker://{client.model_id}/weights/session-end"
        with pytest.raises(
            tinker.RequestFailedError, match=f"showed no sign of life; go on from its newest checkpoint, {kept}, with"
        ):
            client.optim_step(STEP).result()
        with pytest.raises(Exception, match="are gone: its session is finished"):
            samplers[0].compute_logprobs(text_input(1, 8)).result()
        assert list((tmp_path / "data" / "snapshots").iterdir()) == []
        with connect(running) as service:
            resumed = [
                steps(service.create_training_client_from_state_with_optimizer(p).result(), 2, 2) for p in (path, kept)
            ]
        assert resumed[0] == resumed[1]
