"""Samples whose engine or server is killed are sent again by the SDK, which polls for all at once, and come out the same.

Those whose worker is killed are in `test_worker_death.py`.
"""

import os
import signal
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from tests.acceptance.talking import text_input
from tests.running import serving


def samples_run(status: dict[str, Any]) -> bool:
    """Whether a sequence runs."""
    return bool(status["samples"]["running"])


def test_samples_outlive_their_engine_and_their_server(text_only: list[str], tmp_path: Path) -> None:
    prompts = [text_input(n, 5) for n in range(2)]
    params = types.SamplingParams(max_tokens=800, temperature=0.0, stop=[])

    def tokens(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int]]:
        return [list(future.result().sequences[0].tokens) for future in futures]

    with serving(tmp_path, *text_only) as first:
        first.wait_for_health()
        port = first.url.rpartition(":")[2]
        service = tinker.ServiceClient(base_url=first.url, api_key="tml-acceptance")
        sampler = service.create_sampling_client(base_model="text").result()
        expected = tokens([sampler.sample(prompt, 1, params) for prompt in prompts])

        asked = [sampler.sample(prompt, 1, params) for prompt in prompts]
        first.wait_for_status(samples_run)
        os.kill(first.engine_pid(), signal.SIGKILL)
        assert tokens(asked) == expected

        asked = [sampler.sample(prompt, 1, params) for prompt in prompts]
        first.wait_for_status(samples_run)
        first.process.kill()
        first.process.wait()
    with serving(tmp_path, *text_only, "--port", port) as second:
        second.wait_for_health()
        assert tokens(asked) == expected
        service.close("success")
