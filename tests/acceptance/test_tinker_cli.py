"""The `tinker` command line, unmodified, against a server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.acceptance.conftest import API_KEY
from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import datum, learn, scores, text_input, train
from tests.running import START_S, Server

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(server: Server, tmp_path: Path) -> Command:
    """Runs `tinker ARGUMENTS` in an empty directory."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "HOME": str(tmp_path)}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-m", "tinker.cli", *arguments]
        return subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=START_S)

    return run


def succeed(command: Command, *arguments: str) -> str:
    """Run a command that must succeed; what it prints. Its callers also look at what it did."""
    done = command(*arguments)
    # The SDK's HTTP library may abort Python 3.11 at its end, when all is done and printed.
    assert done.returncode in (0, -signal.SIGABRT), done.stderr
    return done.stdout


def answer(command: Command, *arguments: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(succeed(command, "--format", "json", *arguments))


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model after a step."""
    return learn(train(service, "text"), [datum(text_input(0, 12))])


def test_runs_and_models_are_listed(service: tinker.ServiceClient, command: Command) -> None:
    client = trained(service)
    runs = answer(command, "run", "list", "--limit", "1")["runs"]
    assert [run["training_run_id"] for run in runs] == [client.model_id]
    assert (runs[0]["base_model"], runs[0]["lora_rank"]) == ("text", 8)
    assert client.model_id in succeed(command, "run", "info", client.model_id)
    unknown = command("run", "info", "nothing")
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (1, False)
    assert {model["model_name"] for model in answer(command, "model", "list")["models"]} == {"text", "vision"}


def test_a_checkpoint_is_managed(service: tinker.ServiceClient, rest: tinker.RestClient, command: Command) -> None:
    client = trained(service)
    path = client.save_state("managed").result().path
    other = client.save_weights_for_sampler("other").result().path
    listed = answer(command, "checkpoint", "list", "--run-id", client.model_id)["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [other, path]
    succeed(command, "checkpoint", "publish", path)
    succeed(command, "checkpoint", "set-ttl", path, "--ttl", "7200")
    described = answer(command, "checkpoint", "info", path)
    assert (described["public"], described["expires_at"] is None) == (True, False)
    succeed(command, "checkpoint", "unpublish", path)
    succeed(command, "checkpoint", "set-ttl", path, "--remove")
    (found,) = [c for c in rest.list_checkpoints(client.model_id).result().checkpoints if c.tinker_path == path]
    assert (found.public, found.expires_at) == (False, None)
    succeed(command, "checkpoint", "delete", "--yes", "--run-id", client.model_id)
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_a_training_checkpoint_is_downloaded_and_leaves_nothing_behind(
    service: tinker.ServiceClient, rest: tinker.RestClient, command: Command, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    client = trained(service)
    path = client.save_state("mine").result().path
    before = rest.list_user_checkpoints().result()
    done = answer(command, "checkpoint", "download", path, "--output", str(tmp_path / "out"))
    adapter = Path(done["destination"])
    assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(family_dir("qwen3")), str(adapter))
    np.testing.assert_allclose(transformers_logprobs(network), scores(client, [ITEM])[0], atol=1e-4)
    assert rest.list_user_checkpoints().result() == before
    external = client.save_weights_external("mine").result().path
    done = answer(command, "checkpoint", "download", external)
    again = Path(done["destination"])
    assert (again / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    sampler = client.save_weights_for_sampler("mine").result().path
    assert "cannot be downloaded" in command("checkpoint", "download", sampler).stderr


def test_a_session_is_traced_and_nothing_is_billed(service: tinker.ServiceClient, command: Command, tmp_path: Path) -> None:
    session_id = trained(service).model_id.partition(":train:")[0]
    succeed(command, "session", "export-trace", session_id)
    trace = json.loads((tmp_path / f"{session_id}.pftrace").read_text())
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "b"} == {"create_model", "forward_backward", "optim_step"}
    usage = answer(command, "billing", "usage", "2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z")
    assert usage["data"] == []
    assert answer(command, "billing", "checkpoint-storage")["data"] == []
    assert "Tinker accessible: yes" in succeed(command, "auth", "status")
