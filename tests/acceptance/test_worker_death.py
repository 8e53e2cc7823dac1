"""A worker that is killed takes its models along and nothing else: the engine goes on, and every client learns how it stands."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.running import START_S, Server, serving

GREEDY = types.SamplingParams(max_tokens=300, temperature=0.0, stop=[])


def mapped_files(pid: int) -> set[str]:
    """The files that a process has mapped into its memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def of_torch(files: set[str]) -> set[str]:
    """Those that belong to torch."""
    return {file for file in files if "libtorch" in file or "/torch/" in file}


def tokens(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int]]:
    return [list(future.result(timeout=START_S).sequences[0].tokens) for future in futures]


def sampled_and_saved(client: tinker.TrainingClient) -> str:
    """Train a step, save in every way that there is, and sample the result; returns the path of the checkpoint."""
    client.forward_backward([datum(text_input(1, 12))], "cross_entropy").result()
    client.optim_step(RAW_STEP).result()
    saved = client.save_state("kept").result().path
    client.save_weights_external("out").result()
    client.save_weights_for_sampler("sampled").result()
    sampler = client.save_weights_and_get_sampling_client()
    assert sampler.sample(text_input(0, 5), 1, types.SamplingParams(max_tokens=4, stop=[])).result(timeout=START_S).sequences
    return str(saved)


def test_a_worker_that_is_killed_in_a_pass_costs_its_models_and_nothing_else(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1", "--tokens-per-pass", "2048"]
    with (
        serving(tmp_path, *options) as server,
        server.client() as http,
    ):
        server.wait_for_health()
        engine, first = server.engine_pid(), server.worker_pid()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model="text").result()
            prompts = [text_input(seed, 5) for seed in range(3)]
            expected = tokens([sampler.sample(prompt, 1, GREEDY) for prompt in prompts])
            busy, idle = train(service, "text"), train(service, "text")
            saved = sampled_and_saved(busy)
            of_snapshot = busy.save_weights_and_get_sampling_client()

            work = [datum(text_input(seed, 900), seed) for seed in range(60)]
            pending: dict[str, Any] = {"pass": busy.forward_backward(work, "cross_entropy")}
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            pending |= {
                "step": busy.optim_step(RAW_STEP),
                "save": busy.save_state("late"),
                "later": busy.forward(work[:1], "cross_entropy"),
            }
            samples = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
            gone = of_snapshot.sample(prompts[0], 1, GREEDY)
            os.kill(first, signal.SIGKILL)

            for name, future in pending.items():
                with pytest.raises(tinker.RequestFailedError, match=r"the worker process ended unexpectedly \(signal 9\)") as failed:
                    future.result(timeout=START_S)
                assert f"go on from its newest checkpoint, {saved}" in str(failed.value), name
                assert failed.value.category == types.RequestErrorCategory.Server
            with pytest.raises((ValueError, tinker.NotFoundError), match=r"are gone|ended unexpectedly"):
                gone.result(timeout=START_S)
            assert tokens(samples) == expected  # the SDK has sent them again

            with pytest.raises(tinker.RequestFailedError, match="was lost when"):  # not one that waits, and learns it too
                idle.optim_step(RAW_STEP).result(timeout=START_S)
            again = service.create_training_client_from_state_with_optimizer(saved).result(timeout=START_S)
            again.forward_backward(work[:1], "cross_entropy").result(timeout=START_S)
            again.optim_step(RAW_STEP).result(timeout=START_S)
            sampled_and_saved(train(service, "text"))
            statuses = {run["training_run_id"]: run["status"] for run in http.get("training_runs").json()["training_runs"]}
            assert (statuses[busy.model_id], statuses[idle.model_id], statuses[again.model_id]) == ("lost", "lost", "ready")

        server.wait_for_health()
        assert server.engine_pid() == engine
        assert server.worker_pid() != first
        assert_without_torch(engine, server)
        assert "Traceback" not in server.log.read_text()


def assert_without_torch(engine: int, server: Server) -> None:
    """The engine that has ordered all that is above has not loaded torch.

    A process that imports torch maps its shared libraries (libtorch_cpu.so and others in torch/lib) into its memory, and Python never
    unloads them: so one that has none of them mapped has no `torch` in `sys.modules`. The worker, which has, shows that this would be seen.
    """
    assert of_torch(mapped_files(server.worker_pid()))
    assert of_torch(mapped_files(engine)) == set()
    assert of_torch(mapped_files(server.process.pid)) == set()


def test_a_worker_that_dies_again_and_again_leaves_its_engine_ready_for_the_next(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with serving(tmp_path, "--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1") as server:
        server.wait_for_health()
        engine = server.engine_pid()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            for _ in range(2):
                os.kill(server.worker_pid(), signal.SIGKILL)
                assert "the worker process ended unexpectedly (signal 9)" in server.wait_for_health(503).json()["detail"]
                client = train(service, "text")  # its create_model waits in the log for the next worker
                client.forward_backward([datum(text_input(1, 12))], "cross_entropy").result(timeout=START_S)
                client.optim_step(RAW_STEP).result(timeout=START_S)
        assert server.wait_for_health().status_code == 200
        assert server.engine_pid() == engine
