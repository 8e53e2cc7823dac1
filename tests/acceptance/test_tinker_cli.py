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
from tests.acceptance.talking import scores
from tests.acceptance.test_catalog import trained
from tests.running import START_S, Server


class Tinker:
    """Runs `tinker ARGUMENTS` in an empty directory."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.environment = os.environ | {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "HOME": str(directory),
        }
        self.directory = directory

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-m", "tinker.cli", *arguments]
        options: dict[str, Any] = {"env": self.environment, "cwd": self.directory, "timeout": START_S}
        return subprocess.run(program, capture_output=True, text=True, check=False, **options)

    def succeed(self, *arguments: str) -> str:
        """What a command prints that must succeed. Callers also look at what it did."""
        done = self.run(*arguments)
        # The SDK's HTTP library may abort Python 3.11 at its end, when all is done and printed.
        assert done.returncode in (0, -signal.SIGABRT), done.stderr
        return done.stdout

    def answer(self, *arguments: str) -> Any:
        return json.loads(self.succeed("--format", "json", *arguments))


@pytest.fixture
def command(server: Server, tmp_path: Path) -> Tinker:
    return Tinker(server, tmp_path)


def test_runs_are_listed_and_a_checkpoint_is_managed(
    service: tinker.ServiceClient, rest: tinker.RestClient, command: Tinker, tmp_path: Path
) -> None:
    client = trained(service)
    (run,) = command.answer("run", "list", "--limit", "1")["runs"]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (client.model_id, "text", 8)
    unknown = command.run("run", "info", "nothing")
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (1, False)
    path, other = client.save_state("managed").result().path, client.save_weights_for_sampler("other").result().path
    listed = command.answer("checkpoint", "list", "--run-id", client.model_id)["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [other, path]
    for action, more, public, expires in (
        ("publish", [], True, False),
        ("set-ttl", ["--ttl", "7200"], True, True),
        ("unpublish", [], False, True),
        ("set-ttl", ["--remove"], False, False),
    ):
        command.succeed("checkpoint", action, path, *more)
        (found,) = [
            found for found in rest.list_checkpoints(client.model_id).result().checkpoints if found.tinker_path == path
        ]
        assert (found.public, found.expires_at is not None) == (public, expires)
    command.succeed("checkpoint", "delete", "--yes", "--run-id", client.model_id)
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []
    session_id = client.model_id.partition(":train:")[0]
    command.succeed("session", "export-trace", session_id)
    assert "optim_step" in (tmp_path / f"{session_id}.pftrace").read_text()


def test_a_training_checkpoint_is_downloaded_and_leaves_nothing_behind(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    command: Tinker,
    family_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    client = trained(service)
    path = client.save_state("mine").result().path
    before = rest.list_user_checkpoints().result()
    adapter = Path(command.answer("checkpoint", "download", path, "--output", str(tmp_path / "out"))["destination"])
    assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(family_dir("qwen3")), str(adapter))
    np.testing.assert_allclose(transformers_logprobs(network), scores(client, [ITEM])[0], atol=1e-4)
    assert rest.list_user_checkpoints().result() == before
    sampler = client.save_weights_for_sampler("mine").result().path
    assert "cannot be downloaded" in command.run("checkpoint", "download", sampler).stderr
