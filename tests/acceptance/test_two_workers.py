"""A server with two workers on a CPU: the one that dies is named, also where the other waits for it, and clients go on."""

import signal
from pathlib import Path

import psutil
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, grad_norm, text_input, train
from tests.acceptance.test_worker_death import GREEDY, tokens
from tests.preloaded import process_behind
from tests.running import START_S, Server, serving

SILENT = (
    r"worker 1 of 2: the worker process ended unexpectedly \(it had shown no sign of life for \d+ s \(worker_still_s\) and was killed\)"
)


def second_worker(server: Server) -> psutil.Process:
    """The process of rank 1, which is the last but two of its arguments."""
    (found,) = (child for child in psutil.Process(server.engine_pid()).children() if child.cmdline()[-3] == "1")
    return psutil.Process(process_behind(found.pid))


def step(client: tinker.TrainingClient, work: list[types.Datum]) -> tuple[float, float]:
    """The loss of a step, and the norm of its gradient."""
    loss = client.forward_backward(work, "cross_entropy").result(timeout=START_S).metrics["loss:sum"]
    return loss, grad_norm(client)


@pytest.mark.slow  # test_worker_death.py has it with one worker, and tests/distributed the end of one of two
def test_a_worker_that_is_killed_is_named_and_its_models_come_back(text_only: list[str], tmp_path: Path) -> None:
    options = [*text_only, "--tokens-per-pass", "2048", "--kept-copies-share", "1"]
    with serving(tmp_path, *options, "--workers", "2", "--device", "cpu", "--worker-still-s", "30") as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model="text").result()
            prompts = [text_input(seed, 5) for seed in range(6)]
            expected = tokens([sampler.sample(prompt, 1, GREEDY) for prompt in prompts])
            undisturbed, model = train(service, "text"), train(service, "text")
            work = [datum(text_input(seed, 900), seed) for seed in range(40)]
            before, after = step(undisturbed, work), step(undisturbed, work)

            # In a pass of both, while both sample.
            pending = model.forward_backward(work, "cross_entropy")
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            samples = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
            second_worker(server).kill()
            came = pending.result(timeout=START_S).metrics["loss:sum"], grad_norm(model)
            assert came == pytest.approx(before, rel=1e-6)
            assert tokens(samples) == expected  # the SDK has sent them again

            # It stops while the first waits for its gradients, which are lost with it: the model stays as it was.
            model.forward_backward(work[:1], "cross_entropy").result(timeout=START_S)
            second = second_worker(server)
            second.suspend()
            spoiled = model.optim_step(RAW_STEP)
            server.wait_for_status(lambda status: any(model["queued"] for model in status["models"]))
            with pytest.raises(tinker.RequestFailedError, match=rf"{SILENT}; the model came back .* send these again"):
                spoiled.result(timeout=START_S)
            assert step(model, work) == pytest.approx(after, rel=1e-6)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 0
    assert "Traceback" not in server.log.read_text()
