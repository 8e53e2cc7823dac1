"""A worker that is killed: its models come back, the engine goes on, and every client only waits.

Invariant: A worker that dies takes no engine along: samples of the base come out, and the next worker is started.
Also: `tests/engine/test_worker_process.py`.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, grad_norm, learn, text_input, train
from tests.running import START_S

GREEDY = types.SamplingParams(max_tokens=300, temperature=0.0, stop=[])


def tokens(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int]]:
    return [list(future.result(timeout=START_S).sequences[0].tokens) for future in futures]


def steps(client: tinker.TrainingClient, seeds: Sequence[int]) -> list[float]:
    """Take one step for each seed; returns their losses and the norms of their gradients."""
    found = []
    for seed in seeds:
        passed = client.forward_backward([datum(text_input(seed, 200), seed)] * 2, "cross_entropy")
        found += [passed.result(timeout=START_S).metrics["loss:sum"], grad_norm(client)]
    return found


def loss(future: Any) -> float:
    return float(future.result(timeout=START_S).metrics["loss:sum"])


def test_models_come_back_from_a_worker_that_is_killed_and_clients_only_wait(
    text_only: list[str], tmp_path: Path
) -> None:
    """In a pass, between steps, while it saves, and with open gradients; with settings as they are by default.

    What follows is what follows in a run that nobody disturbs, to the last bit.
    """
    options = [*text_only, "--tokens-per-pass", "2048"]
    with ready(tmp_path, *options) as server, server.client() as http:
        engine, first = server.engine_pid(), server.worker_pid()
        with connect(server) as service:
            sampler = service.create_sampling_client(base_model="text").result()
            prompts = [text_input(seed, 5) for seed in range(3)]
            expected = tokens([sampler.sample(prompt, 1, GREEDY) for prompt in prompts])
            work = [datum(text_input(seed, 900), seed) for seed in range(30)]
            undisturbed, busy, idle = train(service, "text"), train(service, "text"), train(service, "text")
            before = steps(undisturbed, [1, 2])
            losses = [loss(undisturbed.forward_backward(work, "cross_entropy")), grad_norm(undisturbed)]
            losses.append(loss(undisturbed.forward(work[:1], "cross_entropy")))
            after = steps(undisturbed, [3])

            assert steps(busy, [1, 2]) == before
            assert steps(idle, [1]) == before[:2]
            of_snapshot = busy.save_weights_and_get_sampling_client()
            of_weights = tokens([of_snapshot.sample(prompts[0], 1, GREEDY)])
            passed = busy.forward_backward(work, "cross_entropy")
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            step, save, later = (
                busy.optim_step(RAW_STEP),
                busy.save_state("late"),
                busy.forward(work[:1], "cross_entropy"),
            )
            samples = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
            samples.append(of_snapshot.sample(prompts[0], 1, GREEDY))
            os.kill(first, signal.SIGKILL)
            came = [loss(passed), (step.result(timeout=START_S).metrics or {})["grad_norm"], loss(later)]
            assert came == losses
            assert tokens(samples) == expected + of_weights  # the SDK has sent them again
            assert steps(busy, [3]) == after
            assert steps(idle, [2]) == before[2:]

            saved = save.result(timeout=START_S).path
            again = service.create_training_client_from_state_with_optimizer(saved).result(timeout=START_S)
            assert steps(again, [3]) == after
            for client in (undisturbed, again):
                client.forward_backward(work[:1], "cross_entropy").result(timeout=START_S)
            norm = grad_norm(undisturbed)
            os.kill(server.worker_pid(), signal.SIGKILL)
            assert grad_norm(again) == norm
            learn(again, [datum(text_input(1, 12))])
            for kind in ("save_state", "save_weights_external", "save_weights_for_sampler"):
                getattr(again, kind)("kept").result(timeout=START_S)
            assert tokens([again.save_weights_and_get_sampling_client().sample(prompts[0], 1, GREEDY)])
            statuses = {
                run["training_run_id"]: run["status"] for run in http.get("training_runs").json()["training_runs"]
            }
            assert {statuses[client.model_id] for client in (undisturbed, busy, idle, again)} == {"ready"}

        server.wait_for_health()
        assert server.engine_pid() == engine
        assert server.worker_pid() != first
        assert "Traceback" not in server.log.read_text()
