"""Adapters that a client uploads: what was exported samples the same tokens again, and trains on.

Of SDK 0.39, which is not installed here, the two routes are called with httpx.
"""

import json
from typing import Any

import httpx
import pytest
import tinker
from safetensors.torch import load, save
from tinker import types

from tests.acceptance.talking import datum, learn, numbers, text_input, train

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = {"rank": 8, "seed": 3}


def exported(http: httpx.Client, client: tinker.TrainingClient) -> dict[str, bytes]:
    path = client.save_weights_external("out").result().path
    run, _, name = path.removeprefix("tinker://").split("/")
    shown = http.get(f"training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls")
    return {file: http.get(url).content for file, url in shown.raise_for_status().json()["urls"].items()}


def start(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    body = {"base_model": "text", "lora_config": LORA, "destination_project_id": "uploads"} | changes
    begun: dict[str, Any] = http.post("external_weights_upload_start", json=body).raise_for_status().json()
    return begun


def upload(http: httpx.Client, files: dict[str, bytes], begun: dict[str, Any]) -> httpx.Response:
    for file, content in files.items():
        httpx.put(begun["urls"][file], content=content).raise_for_status()  # without a key
    return finish(http, begun["upload_id"])


def finish(http: httpx.Client, upload_id: str) -> httpx.Response:
    return http.post("external_weights_upload_finish", json={"upload_id": upload_id}, timeout=600)


def test_what_was_exported_samples_the_same_when_it_is_uploaded_and_trains_on(
    http: httpx.Client, service: tinker.ServiceClient
) -> None:
    """Invariant: An uploaded adapter computes what the exported one did."""
    client = learn(train(service, "text"), [datum(text_input(0, 12))])
    files = exported(http, client)
    begun = start(http)
    assert sorted(begun["urls"]) == [CONFIG, WEIGHTS]
    for file, url in begun["urls"].items():
        assert http.put(url, content=b"garbage").status_code == 200
        assert http.put(url, content=files[file]).status_code == 200  # takes its place
    reply = finish(http, begun["upload_id"])
    path = reply.raise_for_status().json()["tinker_path"]
    assert finish(http, begun["upload_id"]).json() == {"tinker_path": path}
    assert httpx.put(begun["urls"][CONFIG], content=files[CONFIG]).status_code == 404

    own = client.save_weights_and_get_sampling_client().result()
    uploaded = service.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=24, seed=5)
    first, second = (
        sampler.sample(text_input(1, 6), num_samples=2, sampling_params=params).result() for sampler in (own, uploaded)
    )
    for mine, theirs in zip(first.sequences, second.sequences, strict=True):
        assert mine.tokens == theirs.tokens
        assert numbers(mine.logprobs) == pytest.approx(numbers(theirs.logprobs), abs=1e-5)

    trained = service.create_training_client_from_state(path.replace("/sampler_weights/", "/weights/")).result()
    again, before = ([datum(text_input(2, 12))], client.forward([datum(text_input(2, 12))], "cross_entropy").result())
    found = trained.forward(again, "cross_entropy").result()
    assert found.metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"], rel=1e-5)
    learn(trained, again)
    assert trained.forward(again, "cross_entropy").result().metrics["loss:sum"] != found.metrics["loss:sum"]


def test_files_that_are_no_such_adapter_are_refused_and_leave_nothing(
    http: httpx.Client, service: tinker.ServiceClient
) -> None:
    files = exported(http, learn(train(service, "text"), [datum(text_input(0, 12))]))
    tensors = load(files[WEIGHTS])
    name = min(tensors)
    begun = start(http)
    scaled = json.loads(files[CONFIG]) | {"use_dora": True}
    before = http.get("training_runs").json()["cursor"]["total_count"]
    for changed, config, said in (
        ({WEIGHTS: b"no tensors"}, {}, "adapter_model.safetensors"),
        ({WEIGHTS: save({name: tensors[name]})}, {}, "the adapter holds"),
        ({WEIGHTS: save(tensors | {name: tensors[name] * float("nan")})}, {}, "not finite"),
        ({CONFIG: b"{"}, {}, "adapter_config.json"),
        ({CONFIG: b"[" * 100_000}, {}, "adapter_config.json"),
        ({CONFIG: json.dumps(scaled).encode()}, {}, "use_dora of PEFT cannot be used"),
        ({}, {"lora_config": LORA | {"rank": 4}}, "the files hold an adapter with rank=8, and lora_config says rank=4"),
        ({}, {"lora_config": LORA | {"train_mlp": False}}, "lora_config says train_mlp=False"),
    ):
        reply = upload(http, files | changed, start(http, **config) if config else begun)
        assert (reply.status_code, said in reply.text) == (400, True), (said, reply.text)
        assert "/uploads/" not in reply.text
    assert http.get("training_runs").json()["cursor"]["total_count"] == before


def test_an_upload_is_refused_before_anything_large_is_taken(http: httpx.Client) -> None:
    for changes, said in (
        ({"lora_config": {"rank": 0}}, "0 is of no adapter"),
        ({"lora_config": {"rank": 100_000}}, "--max-lora-rank"),
        ({"base_model": "none"}, "is not served here"),
        ({"more": 1}, "more"),
    ):
        body: dict[str, Any] = {"base_model": "text", "lora_config": LORA} | changes
        reply = http.post("external_weights_upload_start", json=body)
        assert reply.status_code in (400, 404, 422), reply.text
        assert said in reply.text
    begun = start(http)
    config, weights = (begun["urls"][file] for file in (CONFIG, WEIGHTS))
    assert httpx.put(config, content=b" " * (2**20 + 1)).status_code == 413
    assert "Content-Length" in httpx.put(config, content=iter([b"{}"])).text
    assert httpx.put(config.replace(CONFIG, WEIGHTS), content=b"{}").status_code == 403
    assert httpx.put(weights.replace("expires=", "expires=1"), content=b"{}").status_code == 403
    reply = finish(http, begun["upload_id"])
    assert (reply.status_code, f"{CONFIG} is not there" in reply.text) == (400, True)
    assert finish(http, "0" * 32).status_code == 404
    assert finish(http, "../../x").status_code == 404
