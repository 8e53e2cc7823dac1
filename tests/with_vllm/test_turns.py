"""Trainer and vLLM take turns on one device (--vllm-turn-s).

On a CPU vLLM frees no memory when it sleeps; all else is as on a GPU: it pauses, drops its cache and computes kept
samples again. With TINSMITH_TEST_DEVICE=cuda the test looks at the memory too.
"""

import re
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.extent import amount
from tests.running import Server
from tests.with_vllm.serving import ON_GPU, wait_for_vllm
from tests.with_vllm.talking import learn, snapshot, trainers_logprobs, worst_difference
from tests.with_vllm.test_bfloat16 import FARTHEST

LONG = types.SamplingParams(max_tokens=amount(300, 900), stop=[], seed=3)
"""On a CPU that takes some twenty turns of a second, or sixty."""
ASLEEP, AWAKE = "the GPU is the trainer's now", "the GPU is the vLLM servers' now"


@pytest.fixture
def turns_service(hybrid_server: Server) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server whose turns are short, once vLLM is ready."""
    wait_for_vllm(hybrid_server)
    with tinker.ServiceClient(base_url=hybrid_server.url, api_key="tml-turns") as service:
        yield service


def agrees(client: tinker.TrainingClient, prompt: types.ModelInput, reply: Any) -> bool:
    """Whether the trainer has the log-probabilities of a reply, on average where both round to bfloat16."""
    if not ON_GPU:
        return worst_difference(client, prompt, reply) < 5e-4  # as in `test_agreement.py`
    apart = [np.abs(numbers(s.logprobs) - trainers_logprobs(client, prompt, s.tokens)) for s in reply.sequences]
    return bool(np.mean(apart) < FARTHEST)


def used_mib() -> int:
    """Memory of the GPU that is in use."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def test_both_go_on_when_both_have_work_without_end_and_every_number_is_right(
    hybrid_server: Server, turns_service: tinker.ServiceClient
) -> None:
    """Samples that take many turns have the numbers of the weights they began with, adapters and full weights, text and
    images."""
    awake_mib = used_mib() if ON_GPU else 0
    adapters, full, other = (train(turns_service, "tiny", rank=rank) for rank in (8, 0, 8))
    learn(adapters)
    learn(full)
    if ON_GPU:
        hybrid_server.wait_for_log(ASLEEP)
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
    log = hybrid_server.log.read_text()
    turns = re.findall(f"{ASLEEP}|{AWAKE}", log)
    assert turns == [ASLEEP, AWAKE] * (len(turns) // 2) + [ASLEEP] * (len(turns) % 2)
    assert turns.count(AWAKE) > 1
    assert "does not fall asleep" not in log
