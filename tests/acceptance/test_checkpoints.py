"""Checkpoints through the SDK: resumed runs, saved weights to sample from, a new server on the same data.

Invariant: A resumed run gives the losses of an uninterrupted one, also on a new server; a checkpoint never changes.
Also: `tests/training/test_checkpoint.py`.
"""

from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import datum, numbers, scores, text_input, train
from tests.running import serving

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
    assert path.startswith("tinker://")
    assert path.endswith(":train:0/weights/three")
    uninterrupted = steps(client, 3, 3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert steps(resumed, 3, 3) == uninterrupted
    weights_only = service.create_training_client_from_state(path).result()
    assert weights_only.get_info().lora_rank == (rank or None)
    fresh = steps(weights_only, 3, 3)
    assert fresh[0] == uninterrupted[0]
    assert fresh[1:] != uninterrupted[1:]
    older = train(service, "text", rank, seed=99)
    older.load_state_with_optimizer(path).result()
    assert steps(older, 3, 3) == uninterrupted


def test_checkpoints_outlive_the_server(text_only: list[str], tmp_path: Path) -> None:
    losses, before, paths = [], [], []
    for life in range(2):
        with serving(tmp_path, *text_only) as running:
            running.wait_for_health()
            with tinker.ServiceClient(base_url=running.url, api_key=API_KEY) as service:
                if life == 0:
                    client = train(service, "text")
                    steps(client, 0, 2)
                    paths = [client.save_state("x").result().path, client.save_weights_for_sampler("x").result().path]
                else:
                    client = service.create_training_client_from_state_with_optimizer(paths[0]).result()
                before.append(sample_logprobs(service.create_sampling_client(model_path=paths[1]).result()))
                losses.append(steps(client, 2, 2))
    assert losses[0] == losses[1]
    assert before[0] == before[1]


def test_saved_weights_are_sampled_while_their_model_trains(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    steps(client, 0, 2)
    expected = scores(client, [datum(text_input(1, 8))])
    path = client.save_weights_for_sampler("early").result().path
    assert path.endswith("/sampler_weights/early")
    early = service.create_sampling_client(model_path=path).result()
    ephemeral = client.save_weights_and_get_sampling_client().result()
    before = sample_logprobs(early)
    np.testing.assert_allclose(before, sample_logprobs(ephemeral), atol=1e-5)
    steps(client, 2, 2)
    assert sample_logprobs(early) == before
    assert not np.allclose(sample_logprobs(client.save_weights_and_get_sampling_client().result()), before)
    assert scores(client, [datum(text_input(1, 8))])[0].tolist() != expected[0].tolist()
    both = service.create_sampling_client(model_path=path, base_model="text").result()
    assert sample_logprobs(both) == before
    assert both.get_base_model() == "text"


def test_names_are_taken_once(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    first = client.save_state("a").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists already; use another name, or overwrite=True"):
        client.save_state("a").result()
    before = scores(client, [datum(text_input(0, 8))])
    steps(client, 0, 2)
    trained = scores(client, [datum(text_input(0, 8))])
    assert client.save_state("a", overwrite=True).result().path == first
    loaded = scores(service.create_training_client_from_state(first).result(), [datum(text_input(0, 8))])
    assert loaded[0].tolist() == trained[0].tolist() != before[0].tolist()
    client.save_weights_for_sampler("a").result()
    with pytest.raises(tinker.RequestFailedError, match="sampler_weights/a exists already; use another name for"):
        client.save_weights_for_sampler("a").result()
    client.save_weights_external("a").result()
    with pytest.raises(tinker.RequestFailedError, match="external_weights/a exists already"):
        client.save_weights_external("a").result()


def test_paths_of_the_wrong_kind_or_base_are_refused(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    training, sampling = client.save_state("k").result().path, client.save_weights_for_sampler("k").result().path
    with pytest.raises(Exception, match="these weights were saved for sampling"):
        service.create_training_client_from_state(sampling).result()
    with pytest.raises(Exception, match="these weights were saved for training"):
        service.create_sampling_client(model_path=training).result()
    with pytest.raises(Exception, match="were saved to be downloaded"):
        service.create_training_client_from_state(client.save_weights_external("k").result().path).result()
    with pytest.raises(Exception, match="tinker://x/weights/y does not exist"):
        service.create_training_client_from_state("tinker://x/weights/y").result()
    with pytest.raises(Exception, match="'vision' is of architecture qwen3_vl, but tinker://"):
        service.create_training_client_from_state(training, base_model="vision").result()
    with pytest.raises(Exception, match="of architecture qwen3_vl, but"):
        service.create_sampling_client(model_path=sampling, base_model="vision").result()
    steps(client, 0, 1)
    with pytest.raises(tinker.RequestFailedError, match="load_weights must be the first request of a model"):
        client.load_state(training).result()
    other_rank = train(service, "text", rank=4)
    with pytest.raises(tinker.RequestFailedError, match="saved with rank=8, the model was created with rank=4; create one with rank=8 "):
        other_rank.load_state(training).result()


def test_a_path_is_not_there_before_its_future_is_done(service: tinker.ServiceClient, http: httpx.Client) -> None:
    client = train(service, "text")
    session_id = client.model_id.partition(":train:")[0]
    path = f"tinker://{client.model_id}/sampler_weights/later"
    body = {"session_id": session_id, "sampling_session_seq_id": 7, "model_path": path}
    assert http.post("create_sampling_session", json=body).status_code == 404
    client.save_weights_for_sampler("later").result()
    reply = http.post("create_sampling_session", json=body)
    sampler_id = reply.json()["sampling_session_id"]
    described = http.get(f"samplers/{sampler_id}").json()
    assert described == {"sampler_id": sampler_id, "base_model": "text", "model_path": path}


def test_a_session_that_goes_away_leaves_its_models_and_snapshots_come_back_from_disk(text_only: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *text_only, "--session-idle-s", "8", "--snapshot-gib", "0") as running:
        running.wait_for_health()
        client = train(tinker.ServiceClient(base_url=running.url, api_key=API_KEY), "text")
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
        with pytest.raises(tinker.RequestFailedError, match=f"showed no sign of life; go on from its newest checkpoint, {kept}, with"):
            client.optim_step(STEP).result()
        with pytest.raises(Exception, match="are gone: its session is finished"):
            samplers[0].compute_logprobs(text_input(1, 8)).result()
        assert list((tmp_path / "data" / "snapshots").iterdir()) == []
        with tinker.ServiceClient(base_url=running.url, api_key=API_KEY) as service:
            resumed = [steps(service.create_training_client_from_state_with_optimizer(p).result(), 2, 2) for p in (path, kept)]
        assert resumed[0] == resumed[1]
