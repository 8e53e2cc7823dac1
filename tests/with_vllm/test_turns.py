"""Trainer and vLLM take turns on one device (--vllm-turn-s).

On a CPU vLLM frees no memory when it sleeps; all else is as on a GPU: it pauses, drops its cache and computes kept samples again. With
TINSMITH_TEST_DEVICE=cuda the test looks at the memory too.
"""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.extent import amount
from tests.running import Server
from tests.with_vllm.serving import ON_GPU, sampling_with_vllm, vllm_pids, wait_for_vllm
from tests.with_vllm.talking import learn, sample, snapshot, trainers_logprobs, worst_difference
from tests.with_vllm.test_bfloat16 import FARTHEST

LONG = types.SamplingParams(max_tokens=amount(300, 900), stop=[], seed=3)
"""On a CPU that takes some twenty turns of a second, or sixty."""
ASLEEP, AWAKE = "the GPU is the trainer's now", "the GPU is the vLLM servers' now"


@pytest.fixture(scope="module")
def taking_turns(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose turns are short."""
    options = ("--base-model", f"tiny={vision_dir}", "--vllm-turn-s", "1")
    with sampling_with_vllm(tmp_path_factory.mktemp("turns"), *options) as running:
        yield running


def agrees(client: tinker.TrainingClient, prompt: types.ModelInput, reply: Any) -> bool:
    """Whether the trainer has the log-probabilities of a reply, on average where both round to bfloat16."""
    if not ON_GPU:
        return worst_difference(client, prompt, reply) < 1e-4
    apart = [np.abs(numbers(s.logprobs) - trainers_logprobs(client, prompt, s.tokens)) for s in reply.sequences]
    return bool(np.mean(apart) < FARTHEST)


def used_mib() -> int:
    """Memory of the GPU that is in use."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def test_both_go_on_when_both_have_work_without_end_and_every_number_is_right(taking_turns: Server) -> None:
    """Samples that take many turns have the numbers of the weights they began with, adapters and full weights, text and pictures."""
    wait_for_vllm(taking_turns)
    awake_mib = used_mib() if ON_GPU else 0
    with tinker.ServiceClient(base_url=taking_turns.url, api_key="tml-turns") as service:
        adapters, full, other = train(service, "tiny", rank=8), train(service, "tiny", rank=0), train(service, "tiny", rank=8)
        learn(adapters)
        learn(full)
        if ON_GPU:
            taking_turns.wait_for_log(ASLEEP)
            assert used_mib() < awake_mib / 2
        samplers = [(adapters, snapshot(adapters)), (full, snapshot(full))]
        prompts = (text_input(1, 30), image_input(adapters, 2))
        ended = threading.Event()
        steps = 0

        def go_on_learning() -> None:
            nonlocal steps
            while not ended.is_set():
                learn(other, seed=steps)
                steps += 1

        learner = threading.Thread(target=go_on_learning)
        learner.start()
        try:
            under_way = [(client, p, s.sample(p, 4, LONG)) for client, s in samplers for p in prompts]
            replies = [(client, p, future.result()) for client, p, future in under_way]
        finally:
            ended.set()
            learner.join()
        assert steps > 1
        for client, prompt, reply in replies:
            assert [len(sequence.tokens) for sequence in reply.sequences] == [LONG.max_tokens] * 4
            assert agrees(client, prompt, reply)
    log = taking_turns.log.read_text()
    turns = re.findall(f"{ASLEEP}|{AWAKE}", log)
    assert turns == [ASLEEP, AWAKE] * (len(turns) // 2) + [ASLEEP] * (len(turns) % 2)
    assert turns.count(AWAKE) > 1
    assert "does not fall asleep" not in log


def test_a_sample_wakes_the_servers_and_new_weights_are_sampled(taking_turns: Server) -> None:
    """They were published while the servers slept."""
    with tinker.ServiceClient(base_url=taking_turns.url, api_key="tml-turns") as service:
        client = train(service, "tiny", rank=8)
        for seed in range(3):
            learn(client, seed=seed)
            prompt = image_input(client, seed)
            assert agrees(client, prompt, sample(snapshot(client), prompt))


@pytest.mark.slow  # it takes another start; `tests/sampling/vllm/test_sleep.py` has servers that die or disobey
def test_a_server_that_dies_asleep_starts_again_when_a_sample_needs_it(taking_turns: Server) -> None:
    with tinker.ServiceClient(base_url=taking_turns.url, api_key="tml-turns") as service:
        client = train(service, "tiny", rank=8)
        learn(client)
        assert re.findall(f"{ASLEEP}|{AWAKE}", taking_turns.log.read_text())[-1] == ASLEEP
        (pid,) = vllm_pids(taking_turns)
        os.kill(pid, signal.SIGKILL)
        taking_turns.wait_for_log("a vLLM server ended (exit code -9)")
        learn(client, seed=1)
        assert vllm_pids(taking_turns) == []
        prompt = text_input(1, 30)
        assert agrees(client, prompt, sample(snapshot(client), prompt))
