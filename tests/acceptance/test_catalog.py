"""Runs, checkpoints and sessions through the SDK's RestClient."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from peft import PeftModel
from tinker import types
from tinker.cli.auth_api import TinkerAuthApi
from transformers import AutoModelForCausalLM

from tests.acceptance.conftest import API_KEY
from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, datum, numbers, scores, text_input, train
from tests.running import Server


def trained(service: tinker.ServiceClient, user_metadata: dict[str, str] | None = None) -> tinker.TrainingClient:
    """A LoRA model after a step that moved all of it."""
    client: tinker.TrainingClient = service.create_lora_training_client("text", rank=8, seed=3, user_metadata=user_metadata).result()
    client.forward_backward([datum(text_input(0, 12))], "cross_entropy")
    client.optim_step(RAW_STEP).result()
    return client


def fetch(url: str, headers: dict[str, str] | None = None) -> bytes:
    """A plain GET without a key, as downloads are."""
    content: bytes = urllib.request.urlopen(urllib.request.Request(url, headers=headers or {})).read()
    return content


def download(rest: tinker.RestClient, path: str, directory: Path) -> list[str]:
    """All files of external weights; returns their names."""
    urls = rest.get_external_weights_urls(path).result().urls
    directory.mkdir()
    for name, url in urls.items():
        (directory / name).write_bytes(fetch(url))
    return sorted(urls)


def test_runs_and_checkpoints_are_listed_as_they_were_made(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client = trained(service, user_metadata={"renderer_name": "qwen3_disable_thinking"})
    before = datetime.now(UTC)
    first = client.save_state("one", user_metadata={"step": "1"}).result().path
    sampler = client.save_weights_for_sampler("one", ttl_seconds=7200).result().path
    run = rest.get_training_run(client.model_id).result()
    assert run == rest.get_training_run_by_tinker_path(first).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (client.model_id, "text", True, 8)
    assert run.user_metadata == {"renderer_name": "qwen3_disable_thinking"}
    assert not run.corrupted
    assert run.last_request_time >= before
    assert run.last_checkpoint is not None
    assert (run.last_checkpoint.tinker_path, run.last_checkpoint.user_metadata) == (first, {"step": "1"})
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == sampler
    of_run = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(c.checkpoint_type, c.checkpoint_id) for c in of_run] == [("sampler", "sampler_weights/one"), ("training", "weights/one")]
    assert of_run[0].expires_at is not None
    assert abs(of_run[0].expires_at - of_run[0].time - timedelta(hours=2)) < timedelta(seconds=1)
    # The optimizer's two moments are beside the weights of a checkpoint to train on.
    assert (of_run[1].size_bytes or 0) > 2.5 * (of_run[0].size_bytes or 0) > 0
    everything = rest.list_user_checkpoints(limit=2).result()
    assert [c.tinker_path for c in everything.checkpoints] == [sampler, first]
    assert everything.cursor is not None
    assert everything.cursor.total_count >= 2


def test_runs_are_paged(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    clients = [train(service, "text", rank=1) for _ in range(3)]
    pages = [rest.list_training_runs(limit=2, offset=offset).result() for offset in (0, 2)]
    found = [run.training_run_id for page in pages for run in page.training_runs]
    assert found[:3] == [client.model_id for client in clients][::-1]
    assert (pages[1].cursor.offset, pages[1].cursor.limit) == (2, 2)
    assert pages[0].cursor.total_count == pages[1].cursor.total_count >= 3


def test_a_checkpoint_is_published_expired_and_deleted(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client = trained(service)
    path = client.save_weights_for_sampler("x").result().path

    def state() -> types.Checkpoint:
        (found,) = rest.list_checkpoints(client.model_id).result().checkpoints
        return found

    rest.publish_checkpoint_from_tinker_path(path).result()
    assert state().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not state().public
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    expires_at = state().expires_at
    assert expires_at is not None
    assert timedelta(minutes=59) < expires_at - datetime.now(UTC) <= timedelta(hours=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert state().expires_at is None
    sampler = service.create_sampling_client(model_path=path).result()
    sampler.compute_logprobs(text_input(1, 8)).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []
    with pytest.raises(Exception, match="does not exist"):
        rest.delete_checkpoint(client.model_id, "sampler_weights/x").result()
    with pytest.raises(Exception, match="does not exist"):
        sampler.compute_logprobs(text_input(1, 8)).result()
    # The name is free again.
    assert client.save_weights_for_sampler("x").result().path == path


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


def test_weights_info_says_how_to_load_a_checkpoint(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    lora = service.create_lora_training_client(base_model="text", rank=4, train_mlp=False).result()
    info = rest.get_weights_info_by_tinker_path(lora.save_state("i").result().path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("text", True, 4)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, True)


def test_external_weights_are_downloaded_and_loaded_by_peft(
    service: tinker.ServiceClient, rest: tinker.RestClient, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    client = trained(service)
    saved = client.save_weights_external("out").result()
    assert saved.path == f"tinker://{client.model_id}/external_weights/out"
    assert download(rest, saved.path, tmp_path / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "text"
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(family_dir("qwen3")), str(tmp_path / "adapter"))
    np.testing.assert_allclose(transformers_logprobs(network), scores(client, [ITEM])[0], atol=1e-4)
    (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (listed.checkpoint_type, listed.tinker_path, listed.expires_at) == ("external", saved.path, None)
    assert listed.size_bytes == sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())
    with pytest.raises(Exception, match="were saved to be downloaded"):
        service.create_training_client_from_state(saved.path).result()
    with pytest.raises(tinker.RequestFailedError, match="external_weights/out exists already"):
        client.save_weights_external("out").result()


def test_full_weights_are_downloaded_as_a_transformers_model(
    service: tinker.ServiceClient, rest: tinker.RestClient, tmp_path: Path
) -> None:
    client = train(service, "text", rank=0)
    client.forward_backward([datum(text_input(0, 12))], "cross_entropy")
    client.optim_step(RAW_STEP).result()
    files = download(rest, client.save_weights_external("full").result().path, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(transformers_logprobs(network), scores(client, [ITEM])[0], atol=1e-4)


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


def test_an_address_is_refused_once_it_is_changed_or_its_weights_are_gone(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    path = trained(service).save_weights_external("signed").result().path
    signed = rest.get_external_weights_urls(path).result()
    assert timedelta(minutes=59) < signed.expires - datetime.now(UTC) <= timedelta(hours=1)
    url, other = signed.urls["adapter_config.json"], signed.urls["adapter_model.safetensors"]
    whole = fetch(other)
    assert fetch(other, {"Range": "bytes=100-"}) == whole[100:]
    place, _, query = url.partition("?")
    tampered = {
        403: [
            f"{other.partition('?')[0]}?{query}",
            f"{place}?{query[:-2]}{'0' if query[-2] != '0' else '1'}{query[-1]}",  # the last letter holds bits that mean nothing
            f"{place}?{query.replace('expires=', 'expires=1')}",
        ],
        400: [place],
    }
    for status, urls in tampered.items():
        for wrong in urls:
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetch(wrong)
            assert refused.value.code == status
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(url)


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


def test_a_search_is_paged_by_its_cursor(server: Server, rest: tinker.RestClient) -> None:
    made = []
    for _ in range(3):
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY, display_name="paged", project_id="paged") as service:
            made.append(service.create_sampling_client(base_model="text").result())
    request, seen = types.SessionSearchRequest(project_ids=["paged"], limit=2), []
    while True:
        page = rest.search_sessions(request).result()
        seen += [session.session_id for session in page.sessions]
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert len(seen) == len(set(seen)) == len(made) == 3


def test_what_only_a_hosted_service_has_is_empty(server: Server) -> None:
    admin = tinker.AdminClient(base_url=server.url, api_key=API_KEY)
    assert admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result().data == []
    assert admin.get_current_checkpoint_storage_usage().result().data == []
    assert admin.get_audit_log("checkpoints").result().entries == []
    with httpx.Client() as client:
        key = TinkerAuthApi(client, base_url=server.url).get_self_api_key(API_KEY)
    assert (key.name, key.details.org_details.name) == ("local", "local")
