"""A server with two workers on a CPU: the one that dies is named, also where the other waits for it, and clients go on."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tinker

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.acceptance.test_worker_death import GREEDY, sampled_and_saved, tokens
from tests.running import START_S, Server, serving

DIED = r"worker 1 of 2: the worker process ended unexpectedly \(signal 9\)"


def second_worker(server: Server) -> psutil.Process:
    """The process of rank 1, which is the last but two of its arguments."""
    (found,) = (child for child in psutil.Process(server.engine_pid()).children() if child.cmdline()[-3] == "1")
    return found


def test_a_worker_that_is_killed_is_named_and_training_goes_on_from_a_checkpoint(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1", "--tokens-per-pass", "2048"]
    with serving(tmp_path, *options, "--workers", "2", "--device", "cpu") as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model="text").result()
            prompts = [text_input(seed, 5) for seed in range(6)]
            expected = tokens([sampler.sample(prompt, 1, GREEDY) for prompt in prompts])
            model = train(service, "text")
            saved = sampled_and_saved(model)
            work = [datum(text_input(seed, 900), seed) for seed in range(40)]

            # In a pass of both, while both sample.
            pending = model.forward_backward(work, "cross_entropy")
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            samples = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
            second_worker(server).kill()
            with pytest.raises(tinker.RequestFailedError, match=DIED):
                pending.result(timeout=START_S)
            assert tokens(samples) == expected  # the SDK has sent them again

            # While the first waits for its gradients.
            model = service.create_training_client_from_state_with_optimizer(saved).result(timeout=START_S)
            model.forward_backward(work[:1], "cross_entropy").result(timeout=START_S)
            second = second_worker(server)
            second.suspend()
            step = model.optim_step(RAW_STEP)
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            second.kill()
            with pytest.raises(tinker.RequestFailedError, match=DIED):
                step.result(timeout=START_S)
            model = service.create_training_client_from_state_with_optimizer(saved).result(timeout=START_S)
            model.forward_backward(work, "cross_entropy").result(timeout=START_S)
            model.optim_step(RAW_STEP).result(timeout=START_S)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 0
    assert "Traceback" not in server.log.read_text()
