"""`tinsmith status` against a real server."""

import re
import subprocess
from pathlib import Path

import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.preloaded import REAL_PYTHON
from tests.running import START_S, serving


def tinsmith_status(url: str) -> "subprocess.CompletedProcess[str]":
    command = [REAL_PYTHON, "-m", "tinsmith.cli", "status", "--url", url]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_S)


def test_a_running_server_shows_what_it_does(text_only: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *text_only) as server:
        server.wait_for_health()
        assert re.search(r"the engine is starting: it loads text \(step 2 of 4\)$", server.log.read_text(), re.MULTILINE)
        idle = server.wait_for_status(lambda status: "resident" in status["memory_bytes"] and status["engine"]["busy_s"] == 0)
        assert (idle["models"], idle["tokens_per_second"]) == ([], {"training": 0, "sampling": 0})
        assert idle["engine"] == {"state": "ready", "reason": "", "busy_s": 0.0}
        assert idle["base_models"] == [{"name": "text", "architecture": "qwen3", "max_context": 32768, "takes_images": False}]
        assert "loaded models: none\nsamples: 0 running, 0 waiting\n" in tinsmith_status(server.url).stdout
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = train(service, "text")
            client.forward([datum(text_input(1, 50))], "cross_entropy").result()
            client.forward_backward([datum(text_input(1, 60)), datum(text_input(2, 90))], "cross_entropy").result()
            client.optim_step(RAW_STEP).result()
            sampler = client.save_weights_and_get_sampling_client()
            sampler.sample(text_input(3, 5), 3, types.SamplingParams(max_tokens=8, seed=1, stop=[])).result()
            busy = server.wait_for_status(lambda status: status["tokens_per_second"]["sampling"] > 0)
            (model,) = busy["models"]
            assert (model["base_model"], model["queued"], model["trained_tokens"]) == ("text", 0, 150)
            # Of the last minute: on a very busy machine, what was first may be over already.
            assert busy["tokens_per_second"]["training"] in (150 / 60, 0)
            assert busy["tokens_per_second"]["sampling"] <= 24 / 60
            shown = tinsmith_status(server.url)
            assert (shown.returncode, shown.stderr) == (0, "")
            assert re.search(r"tokens per second, last minute: (2\.5|0) training, [\d.]+ sampling", shown.stdout)
            assert "samples: 0 running, 0 waiting" in shown.stdout
        assert server.wait_for_status(lambda status: not status["models"])["models"] == []
        url = server.url
    gone = tinsmith_status(url)
    assert gone.returncode == 2
    assert gone.stderr.startswith(f"tinsmith: no Tinsmith server answers at {url}: ")
    assert gone.stderr.count("\n") == 1
