"""Snapshots of a long run: old ones that nobody samples make room, and a client of one is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import datum, text_input, train
from tests.acceptance.test_sampling import learn, sampling_client
from tests.running import serving


def test_a_client_of_a_snapshot_that_made_room_is_told_why(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1", "--snapshot-gib", "0", "--snapshot-disk-gib", "0"]
    params = types.SamplingParams(max_tokens=4)
    with serving(tmp_path, *options) as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = train(service, "text")
            samplers = []
            for _ in range(4):
                learn(client, [datum(text_input(0, 9))])
                samplers.append(sampling_client(client))
            assert samplers[-1].sample(prompt=text_input(1, 5), num_samples=1, sampling_params=params).result().sequences
            with pytest.raises(Exception, match=r"are gone: they were sampled least recently of snapshots that take more disk than 0 GiB"):
                samplers[0].sample(prompt=text_input(1, 5), num_samples=1, sampling_params=params).result()
        assert "Traceback" not in server.log.read_text()
