"""`tinsmith status` against a real server."""

import re
import subprocess
from typing import Any

import tinker
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.preloaded import REAL_PYTHON
from tests.running import START_S, Server


def test_a_running_server_shows_what_it_does(server: Server, service: tinker.ServiceClient) -> None:
    supported = service.get_server_capabilities().supported_models
    assert [(model.model_name, model.max_context_length) for model in supported] == [("text", 32768), ("vision", 32768)]
    client = train(service, "text:variant", rank=16)
    info = client.get_info()
    assert (info.model_data.model_name, info.model_data.arch, info.lora_rank) == ("text", "qwen3", 16)
    client.forward([datum(text_input(1, 50))], "cross_entropy").result()
    client.forward_backward([datum(text_input(1, 60)), datum(text_input(2, 90))], "cross_entropy").result()
    client.optim_step(RAW_STEP).result()
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(text_input(3, 5), 3, types.SamplingParams(max_tokens=8, seed=1, stop=[])).result()

    def trained(status: dict[str, Any]) -> list[tuple[str, int, int]]:
        own = [model for model in status["models"] if model["model_id"] == client.model_id]
        return [(model["base_model"], model["queued"], model["trained_tokens"]) for model in own]

    # Others have used this server: what is shown may be of before all this.
    status = server.wait_for_status(
        lambda status: (
            trained(status) == [("text", 0, 150)]
            and (status["tokens_per_second"]["sampling"] > 0, status["engine"]["busy_s"], status["samples"]["running"])
            == (True, 0, 0)
        )
    )
    assert status["engine"] == {"state": "ready", "reason": "", "busy_s": 0.0}
    assert status["base_models"][0] == {
        "name": "text",
        "architecture": "qwen3",
        "max_context": 32768,
        "takes_images": False,
    }
    assert "resident" in status["memory_bytes"]
    command = [REAL_PYTHON, "-m", "tinsmith.cli", "status", server.url]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_S)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"tokens per second, last minute: [\d.]+ training, [\d.]+ sampling", shown.stdout)
    assert "samples: 0 running, 0 waiting" in shown.stdout
