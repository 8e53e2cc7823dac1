"""Checkpoints in an object store: a local S3 server holds the files, the data directory only the rows."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import tinker
from moto.server import ThreadedMotoServer
from safetensors.numpy import load

from tests.acceptance.conftest import API_KEY
from tests.acceptance.elsewhere import ITEM, TOKENS
from tests.acceptance.talking import datum, learn, numbers, scores, text_input, train
from tests.running import serving, tinsmith

BUCKET, ROOT = "kettles", "s3://kettles/team/checkpoints"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """An S3 server with an empty bucket. The environment names it to every process that starts."""
    store = ThreadedMotoServer("127.0.0.1", 0)
    store.start()
    host, port = store.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    boto3.resource("s3").create_bucket(Bucket=BUCKET)
    yield store
    store.stop()


@pytest.fixture
def bucket(s3: ThreadedMotoServer) -> Any:
    """The bucket."""
    return boto3.resource("s3").Bucket(BUCKET)


def keys(bucket: Any) -> list[str]:
    """What lies in the bucket."""
    return [entry.key for entry in bucket.objects.all()]


def test_checkpoints_live_in_an_object_store_and_one_that_fails_fails_the_save_alone(
    s3: ThreadedMotoServer, bucket: Any, text_only: list[str], tmp_path: Path
) -> None:
    with serving(tmp_path, *text_only, "--checkpoint-root", f"{ROOT}/") as server:
        server.wait_for_health()
        assert keys(bucket) == []
        rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = learn(train(service, "text"), [datum(text_input(0, 12))])
            expected = scores(client, [ITEM])[0]
            state, sampler = client.save_state("a").result().path, client.save_weights_for_sampler("a").result().path
            external = client.save_weights_external("a").result().path
            names = sorted(key.rpartition("/")[2] for key in keys(bucket))
            assert names == sorted(
                ["adapter.safetensors", "checkpoint.json"] * 2
                + ["manifest.json"] * 3
                + ["optimizer.safetensors", "adapter_config.json", "adapter_model.safetensors"]
            )
            assert all(key.startswith("team/checkpoints/") for key in keys(bucket))

            resumed = service.create_training_client_from_state_with_optimizer(state).result()
            assert scores(resumed, [ITEM])[0].tolist() == expected.tolist()
            sampled = service.create_sampling_client(model_path=sampler).result().compute_logprobs(tinker.ModelInput.from_ints(TOKENS))
            np.testing.assert_allclose(numbers(sampled.result()[1:]), expected, atol=1e-4)

            urls = rest.get_external_weights_urls(external).result().urls
            assert json.loads(urllib.request.urlopen(urls["adapter_config.json"]).read())["r"] == 8
            content = urllib.request.urlopen(urls["adapter_model.safetensors"]).read()
            assert max(float(np.abs(tensor).max()) for tensor in load(content).values()) > 0
            part = urllib.request.Request(urls["adapter_model.safetensors"], headers={"Range": "bytes=8-"})
            assert urllib.request.urlopen(part).read() == content[8:]

            copy = rest.copy_weights(state, "archive").result()
            rest.delete_checkpoint_from_tinker_path(state).result()
            assert collected(tmp_path) == "there is nothing to delete\n"
            again = service.create_training_client_from_state(copy).result()
            assert scores(again, [ITEM])[0].tolist() == expected.tolist()
            for path in (copy, sampler, external):
                rest.delete_checkpoint_from_tinker_path(path).result()
            assert collected(tmp_path).count("no checkpoint has them any more") == 3
            assert keys(bucket) == []

            s3.stop()
            with pytest.raises(tinker.RequestFailedError, match="of checkpoint files cannot be used: Could not connect") as failed:
                client.save_state("b").result()
            assert failed.value.category == tinker.types.RequestErrorCategory.Server
            assert scores(client, [ITEM])[0].tolist() == expected.tolist()
    assert list((tmp_path / "data" / "checkpoints").iterdir()) == []


def collected(directory: Path) -> str:
    """What `tinsmith gc` prints."""
    done = tinsmith("gc", "--data-dir", str(directory / "data"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("bucket")
def test_a_store_that_cannot_be_used_is_said_before_anything_starts(text_only: list[str], tmp_path: Path) -> None:
    options = ["--port", "0", "--data-dir", str(tmp_path), "--checkpoint-root", "s3://no-such-bucket/x"]
    done = tinsmith("serve", *text_only, *options)
    assert (done.returncode, "checkpoint_root='s3://no-such-bucket/x' cannot be used" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
