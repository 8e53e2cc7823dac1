"""Full weights that do not arrive: the sample fails and says why, and nothing else does."""

import resource

import pytest
import tinker

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.talking import learn, sample, snapshot, worst_difference

TOO_SMALL = 400_000
"""Bytes of a file, where the tiny model needs more than a million."""


def test_weights_that_do_not_arrive_fail_their_sample_alone(server: Server, service: tinker.ServiceClient) -> None:
    full, adapter = train(service, "tiny", rank=0), train(service, "tiny")
    learn(full, seed=6)
    learn(adapter, seed=7)
    of_full, of_adapter = snapshot(full), snapshot(adapter)
    prompt = image_input(full, 1)
    assert worst_difference(adapter, prompt, sample(of_adapter, prompt)) < 1e-4
    former = resource.prlimit(server.engine_pid(), resource.RLIMIT_FSIZE, (TOO_SMALL, resource.RLIM_INFINITY))
    try:
        with pytest.raises(tinker.RequestFailedError, match="weights for vLLM do not fit into"):
            sample(of_full, prompt)
    finally:
        resource.prlimit(server.engine_pid(), resource.RLIMIT_FSIZE, former)
    assert worst_difference(adapter, text_input(3, 9), sample(of_adapter, text_input(3, 9))) < 1e-4
    assert worst_difference(full, prompt, sample(of_full, prompt)) < 1e-4
