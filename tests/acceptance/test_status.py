"""`tinsmith status` against a real server."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.running import Server, serving

SOON_S = 20.0


def tinsmith_status(url: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tinsmith.cli", "status", "--url", url]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def wait_for(server: Server, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that `seen` accepts."""
    deadline = time.monotonic() + SOON_S
    with server.client() as client:
        while True:
            status: dict[str, Any] = client.get("status").json()
            if seen(status) or time.monotonic() > deadline:
                return status
            time.sleep(0.1)


def test_a_running_server_shows_what_it_does(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with serving(tmp_path, "--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1") as server:
        server.wait_for_health()
        idle = wait_for(server, lambda status: "resident" in status["memory_bytes"])
        assert (idle["models"], idle["tokens_per_second"]) == ([], {"training": 0, "sampling": 0})
        assert idle["engine"] == {"state": "ready", "reason": ""}
        assert idle["base_models"] == [{"name": "text", "architecture": "qwen3", "max_context": 32768, "takes_images": False}]
        assert "loaded models: none\nsamples: 0 running, 0 waiting\n" in tinsmith_status(server.url).stdout
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = train(service, "text")
            client.forward([datum(text_input(1, 50))], "cross_entropy").result()
            client.forward_backward([datum(text_input(1, 60)), datum(text_input(2, 90))], "cross_entropy").result()
            client.optim_step(RAW_STEP).result()
            sampler = client.save_weights_and_get_sampling_client()
            sampler.sample(text_input(3, 5), 3, types.SamplingParams(max_tokens=8, seed=1, stop=[])).result()
            busy = wait_for(server, lambda status: status["tokens_per_second"]["sampling"] > 0)
            (model,) = busy["models"]
            assert (model["base_model"], model["queued"], model["trained_tokens"]) == ("text", 0, 150)
            assert busy["tokens_per_second"] == {"training": 150 / 60, "sampling": 24 / 60}
            shown = tinsmith_status(server.url)
            assert (shown.returncode, shown.stderr) == (0, "")
            assert "tokens per second, last minute: 2.5 training, 0.4 sampling" in shown.stdout
            assert "samples: 0 running, 0 waiting" in shown.stdout
        assert wait_for(server, lambda status: not status["models"])["models"] == []
        url = server.url
    gone = tinsmith_status(url)
    assert gone.returncode == 2
    assert gone.stderr.startswith(f"tinsmith: no Tinsmith server answers at {url}: ")
    assert gone.stderr.count("\n") == 1
