"""Servers with two workers that end, in peace or not: what they have trained goes on."""

import os
import signal
from pathlib import Path

import pytest
import tinker

from tests.acceptance.talking import assert_close, assert_losses_close, scores, train
from tests.distributed.test_replicas import STEP, WITHIN, batch, worker_pids
from tests.extent import slow
from tests.running import START_S, serving


def test_what_is_saved_on_two_goes_on_on_one_and_back(options: list[str], tmp_path: Path) -> None:
    """With the optimizer's state: the losses that follow are those of the run that was not interrupted."""

    def go_on(client: tinker.TrainingClient, first: int) -> list[float]:
        done = []
        for step in range(first, first + 3):
            losses = client.forward_backward(batch(client, "text", step), "cross_entropy")
            client.optim_step(STEP).result()
            done.append(losses.result().metrics["loss:sum"])
        return done

    with serving(tmp_path, *options, "--workers", "2") as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-two") as service:
            client = train(service, "text")
            go_on(client, 0)
            path = client.save_state("three").result().path
            expected = go_on(client, 3)
    for count in ("1", "2"):
        with serving(tmp_path, *options, "--workers", count) as server:
            server.wait_for_health()
            with tinker.ServiceClient(base_url=server.url, api_key="tml-two") as service:
                client = service.create_training_client_from_state_with_optimizer(path).result()
                assert_losses_close(go_on(client, 3), expected, WITHIN)
                path = service.create_training_client_from_state_with_optimizer(path).result().save_state(f"again{count}").result().path


@pytest.mark.parametrize("rank", [0, *slow(1)])
def test_a_killed_worker_is_named_and_all_are_started_again(options: list[str], tmp_path: Path, rank: int) -> None:
    """Whichever it is, in the middle of its work. The model comes back and goes on."""
    with serving(tmp_path, *options, "--workers", "2") as server:
        server.wait_for_health()
        first = worker_pids(server)
        with tinker.ServiceClient(base_url=server.url, api_key="tml-kill") as service:
            client = train(service, "text")
            client.forward_backward(batch(client, "text", 0), "cross_entropy").result()
            client.optim_step(STEP).result()
            expected = scores(client, batch(client, "text", 3))
            running = client.forward_backward(batch(client, "text", 1) * 200, "cross_entropy")
            os.kill(first[rank], signal.SIGKILL)
            running.result(timeout=START_S)
            server.wait_for_log(f"worker {rank} of 2: the worker process ended unexpectedly (signal 9)")
            server.wait_for_health()
            second = worker_pids(server)
            assert len(second) == 2
            assert not set(first) & set(second)
            assert_close(scores(client, batch(client, "text", 3)), expected, WITHIN)
            client.optim_step(STEP).result()
