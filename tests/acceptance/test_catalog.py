"""Runs, checkpoints and sessions through the SDK's RestClient.

Invariant: The SDK, the `tinker` command line and the cookbook understand runs, checkpoints and sessions.
Also: `tests/acceptance/test_tinker_cli.py`, `tests/recipes/test_weights_download.py`.
"""

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyrage
import pytest
import tinker
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.acceptance.conftest import API_KEY
from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import datum, learn, numbers, scores, text_input, train
from tests.running import Server


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A LoRA model after a step that moved all of it."""
    return learn(train(service, "text"), [datum(text_input(0, 12))])


def fetch(url: str) -> bytes:
    """A plain GET without a key, as downloads are."""
    content: bytes = urllib.request.urlopen(url).read()
    return content


def download(rest: tinker.RestClient, path: str, directory: Path) -> list[str]:
    """All files of external weights; returns their names."""
    urls = rest.get_external_weights_urls(path).result().urls
    directory.mkdir()
    for name, url in urls.items():
        (directory / name).write_bytes(fetch(url))
    return sorted(urls)


def test_a_copy_is_sampled_and_trained_on_after_its_source_is_gone(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client = trained(service)
    expected = scores(client, [ITEM])[0]
    state, sampler = client.save_state("c").result().path, client.save_weights_for_sampler("c").result().path
    copies = [rest.copy_weights(path, "archive", ttl_seconds=3600).result() for path in (state, sampler)]
    for path in (state, sampler):
        rest.delete_checkpoint_from_tinker_path(path).result()
    time.sleep(0.1)
    again = service.create_training_client_from_state_with_optimizer(copies[0]).result()
    assert scores(again, [ITEM])[0].tolist() == expected.tolist()
    tokens = types.ModelInput.from_ints([*ITEM.model_input.to_ints(), int(ITEM.loss_fn_inputs["target_tokens"].data[-1])])
    got = service.create_sampling_client(model_path=copies[1]).result().compute_logprobs(tokens).result()
    np.testing.assert_allclose(numbers(got[1:]), expected, atol=1e-4)
    (of_project,) = [run for run in rest.list_training_runs(project_id="archive").result().training_runs if run.last_checkpoint]
    assert of_project.last_checkpoint is not None
    assert of_project.last_checkpoint.tinker_path == copies[0]
    with pytest.raises(Exception, match="does not exist"):
        rest.copy_weights(state, "archive").result()


def test_external_weights_are_encrypted_for_their_recipients(
    service: tinker.ServiceClient, rest: tinker.RestClient, server: Server, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    client = trained(service)
    mine, yours, stranger = [pyrage.x25519.Identity.generate() for _ in range(3)]
    recipients = [str(identity.to_public()) for identity in (mine, yours)]
    checkpoints = server.log.parent / "data" / "checkpoints"
    before = set(checkpoints.rglob("*"))
    path = client.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    names = download(rest, path, tmp_path / "encrypted")
    assert names == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    (tmp_path / "adapter").mkdir()
    for name, identity in zip(names, (mine, yours), strict=True):
        content = (tmp_path / "encrypted" / name).read_bytes()
        assert content.startswith(b"age-encryption.org/v1")
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [stranger])
        (tmp_path / "adapter" / name.removesuffix(".age")).write_bytes(pyrage.decrypt(content, [identity]))
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(family_dir("qwen3")), str(tmp_path / "adapter"))
    np.testing.assert_allclose(transformers_logprobs(network), scores(client, [ITEM])[0], atol=1e-4)
    # Nothing in plain text, and nothing unfinished, stays on the server.
    assert {file.name for file in set(checkpoints.rglob("*")) - before if file.is_file()} == {*names, "manifest.json"}
    assert list(checkpoints.glob(".writing-*")) == []
    with pytest.raises(tinker.RequestFailedError, match=r"'nobody' is no age1... key and no SSH public key") as refused:
        client.save_weights_external("other", age_encryption_recipients=["nobody"]).result()
    assert refused.value.category == types.RequestErrorCategory.User


def test_sessions_are_described_searched_and_traced(server: Server, rest: tinker.RestClient) -> None:
    with tinker.ServiceClient(
        base_url=server.url, api_key=API_KEY, display_name="Catalog run 7", user_metadata={"team": "catalog"}, project_id="first"
    ) as service:
        client = trained(service)
        session_id = client.model_id.partition(":train:")[0]
        sampler = service.create_sampling_client(base_model="text").result()
        described = rest.get_session(session_id).result()
        assert described.training_run_ids == [client.model_id]
        assert len(described.sampler_ids) == 1
        assert rest.get_sampler(described.sampler_ids[0]).result().base_model == sampler.get_base_model() == "text"
        assert (described.user_metadata, described.display_name) == ({"team": "catalog"}, "Catalog run 7")
        assert session_id in rest.list_sessions(limit=5).result().sessions
        active = types.SessionSearchRequest(display_name="run catalog", statuses=[types.ActiveSessionStatusQuery()])
        assert [found.session_id for found in rest.search_sessions(active).result().sessions] == [session_id]
        client.save_state("s").result()
        rest.assign_session_project(session_id, "second").result()
        trace = json.loads(fetch(rest.export_session_trace(session_id).result()))
        spans = [event["name"] for event in trace["traceEvents"] if event["ph"] == "e"]
        assert spans == ["create_model", "forward_backward", "optim_step", "save_weights"]
    finished = types.SessionSearchRequest(
        project_ids=["second"],
        user_metadata={"team": "catalog"},
        statuses=[types.ClientFinishedSessionStatusQuery(reasons=["success"])],
        owner=types.AccessibleSearchOwner(),
    )
    (found,) = rest.search_sessions(finished).result().sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (session_id, "second", 1)
    assert (found.checkpoint_storage_bytes or 0) > 0
    assert rest.search_sessions(active).result().sessions == []
