"""Runs, checkpoints and sessions through the SDK's RestClient.

Invariant: The SDK, the `tinker` command line and the cookbook understand runs, checkpoints and sessions.
Also: `tests/acceptance/test_tinker_cli.py`, `tests/recipes/test_weights_download.py`.
"""

import urllib.request
from pathlib import Path
from typing import Any

import pyrage
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import datum, learn, text_input, train
from tests.running import Server


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A LoRA model after a step that moved all of it."""
    return learn(train(service, "text"), [datum(text_input(0, 12))])


def fetch(url: str) -> bytes:
    content: bytes = urllib.request.urlopen(url).read()
    return content


def download(rest: tinker.RestClient, path: str, directory: Path) -> list[str]:
    """All files of external weights; returns their names."""
    urls = rest.get_external_weights_urls(path).result().urls
    directory.mkdir()
    for name, url in urls.items():
        (directory / name).write_bytes(fetch(url))
    return sorted(urls)


def test_external_weights_are_encrypted_for_their_recipients(
    service: tinker.ServiceClient, rest: tinker.RestClient, server: Server, tmp_path: Path
) -> None:
    client = trained(service)
    mine, yours, stranger = [pyrage.x25519.Identity.generate() for _ in range(3)]
    plain = download(rest, client.save_weights_external("plain").result().path, tmp_path / "plain")
    checkpoints = server.log.parent / "data" / "checkpoints"
    before = set(checkpoints.rglob("*"))
    recipients = [str(identity.to_public()) for identity in (mine, yours)]
    path = client.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    names = download(rest, path, tmp_path / "encrypted")
    assert names == [f"{name}.age" for name in plain] == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    for name, identity in zip(names, (mine, yours), strict=True):
        content = (tmp_path / "encrypted" / name).read_bytes()
        assert content.startswith(b"age-encryption.org/v1")
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [stranger])
        assert pyrage.decrypt(content, [identity]) == (tmp_path / "plain" / name.removesuffix(".age")).read_bytes()
    # Nothing in plain text, and nothing unfinished, stays on the server.
    assert {file.name for file in set(checkpoints.rglob("*")) - before if file.is_file()} == {*names, "manifest.json"}
    assert list(checkpoints.glob(".writing-*")) == []
    with pytest.raises(tinker.RequestFailedError, match=r"'nobody' is no age1... key and no SSH public key") as refused:
        client.save_weights_external("other", age_encryption_recipients=["nobody"]).result()
    assert refused.value.category == types.RequestErrorCategory.User


def test_sessions_are_described_searched_and_traced(server: Server, rest: tinker.RestClient) -> None:
    description: dict[str, Any] = {"display_name": "Catalog run 7", "user_metadata": {"team": "catalog"}}
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY, project_id="first", **description) as service:
        client = trained(service)
        session_id = client.model_id.partition(":train:")[0]
        path = client.save_weights_for_sampler("s").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        described = rest.get_session(session_id).result()
        assert described.training_run_ids == [client.model_id]
        (sampler_id,) = described.sampler_ids
        of_sampler = rest.get_sampler(sampler_id).result()
        assert (of_sampler.base_model, of_sampler.model_path) == (sampler.get_base_model(), path) == ("text", path)
        assert (described.user_metadata, described.display_name) == ({"team": "catalog"}, "Catalog run 7")
        assert session_id in rest.list_sessions(limit=5).result().sessions
        active = types.SessionSearchRequest(display_name="run catalog", statuses=[types.ActiveSessionStatusQuery()])
        assert [found.session_id for found in rest.search_sessions(active).result().sessions] == [session_id]
        rest.assign_session_project(session_id, "second").result()
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
