"""Checkpoints in an object store: a local S3 server holds the files, the data directory only the rows.

Invariant: A save or a load that takes its time keeps nobody from training and sampling; the model that is saved goes on
when its copy is there, and what is saved is what it was. Also: `tests/engine/test_saves.py`,
`tests/worker/test_samples.py`.
"""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
import numpy as np
import pytest
import tinker
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from safetensors.numpy import load
from tinker import types
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from tests.acceptance.conftest import connect, ready
from tests.acceptance.elsewhere import ITEM, TOKENS
from tests.acceptance.talking import RAW_STEP, assert_close, datum, learn, logprobs, numbers, scores, text_input, train
from tests.running import Server, tinsmith, tinsmith_here

ROOT = "s3://kettles/team/checkpoints"
WITHIN_S = 120.0
"""How long others may take beside a save that is held as long as the test wants.

What had to wait for the save would take all of it. So it may be long, which it must be on a busy machine.
"""


class Gate:
    """An object store whose uploads wait while the gate is closed, and which may deny everything."""

    def __init__(self, store: Callable[..., Iterable[bytes]]) -> None:
        self.store = store
        self.open, self.waited_for, self.denies = threading.Event(), threading.Event(), False
        self.open.set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.denies:
            return Response("<Error><Code>AccessDenied</Code></Error>", 403)(environ, start_response)
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and not self.open.is_set():
            self.waited_for.set()
            self.open.wait()
        return self.store(environ, start_response)

    @property
    def keys(self) -> list[str]:
        return [entry.key for entry in boto3.resource("s3").Bucket("kettles").objects.all()]


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """The gate of an S3 server with an empty bucket. The environment names it to every process that starts."""
    gate = Gate(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, gate, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        boto3.resource("s3").create_bucket(Bucket="kettles")
        yield gate
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def server(gate: Gate, text_only: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps its checkpoints there."""
    with ready(tmp_path_factory.mktemp("objects"), *text_only, "--checkpoint-root", f"{ROOT}/") as server:
        yield server
    assert list((server.log.parent / "data" / "checkpoints").iterdir()) == []


def collected(server: Server) -> str:
    done = tinsmith("gc", "--data-dir", str(server.log.parent / "data"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_checkpoints_live_in_an_object_store_and_one_that_fails_fails_the_save_alone(
    server: Server, service: tinker.ServiceClient, gate: Gate, rest: tinker.RestClient
) -> None:
    assert collected(server)  # what other tests have left
    before = gate.keys
    client = learn(train(service, "text"), [datum(text_input(0, 12))])
    expected = scores(client, [ITEM])[0]
    state, sampler = client.save_state("a").result().path, client.save_weights_for_sampler("a").result().path
    external = client.save_weights_external("a").result().path
    added = [key.removeprefix("team/checkpoints/").partition("/")[2] for key in gate.keys if key not in before]
    of_training = ["adapter.safetensors", "checkpoint.json", "manifest.json", "optimizer.safetensors"]
    of_sampling = ["adapter.safetensors", "checkpoint.json", "manifest.json"]
    assert sorted(added) == sorted(
        [*of_training, *of_sampling, "adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    )

    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert scores(resumed, [ITEM])[0].tolist() == expected.tolist()
    sampled = (
        service.create_sampling_client(model_path=sampler)
        .result()
        .compute_logprobs(tinker.ModelInput.from_ints(TOKENS))
    )
    np.testing.assert_allclose(numbers(sampled.result()[1:]), expected, atol=1e-4)

    urls = rest.get_external_weights_urls(external).result().urls
    assert json.loads(urllib.request.urlopen(urls["adapter_config.json"]).read())["r"] == 8
    content = urllib.request.urlopen(urls["adapter_model.safetensors"]).read()
    assert max(float(np.abs(tensor).max()) for tensor in load(content).values()) > 0
    part = urllib.request.Request(urls["adapter_model.safetensors"], headers={"Range": "bytes=8-"})
    assert urllib.request.urlopen(part).read() == content[8:]

    copy = rest.copy_weights(state, "archive").result()
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert collected(server) == "there is nothing to delete\n"
    again = service.create_training_client_from_state(copy).result()
    assert scores(again, [ITEM])[0].tolist() == expected.tolist()
    for path in (copy, sampler, external):
        rest.delete_checkpoint_from_tinker_path(path).result()
    for path in (state, copy, sampler, external):
        tinsmith_here("checkpoints", "purge", path, "--data-dir", str(server.log.parent / "data"))
    assert collected(server).count("was deleted") == 4
    assert gate.keys == before

    gate.denies = True
    try:
        with pytest.raises(tinker.RequestFailedError, match="of checkpoint files cannot be used: ") as failed:
            client.save_state("b").result()
    finally:
        gate.denies = False
    assert failed.value.category == types.RequestErrorCategory.Server
    assert scores(client, [ITEM])[0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["save_state", "save_weights_external"])
def test_a_save_that_takes_its_time_stalls_nobody_else_and_its_own_model_no_longer_than_its_copy(
    server: Server, service: tinker.ServiceClient, gate: Gate, kind: str
) -> None:
    """The model trains and is sampled meanwhile, and what is saved is what it was.

    Its next save waits for the one before.
    """
    data, params = [datum(text_input(1, 12))], types.SamplingParams(max_tokens=4, stop=[])
    with connect(server) as neighbour:
        client, other = train(service, "text"), train(neighbour, "text")
        base = neighbour.create_sampling_client(base_model="text").result()
        for model in (client, other):
            model.forward_backward(data, "cross_entropy").result()
        client.optim_step(RAW_STEP).result()
        before = scores(client, data)
        gate.waited_for.clear()
        gate.open.clear()
        saved = getattr(client, kind)("held")
        try:
            assert gate.waited_for.wait(timeout=WITHIN_S), "nothing was uploaded"
            other.optim_step(RAW_STEP).result(timeout=WITHIN_S)
            client.forward_backward(data, "cross_entropy").result(timeout=WITHIN_S)
            client.optim_step(RAW_STEP).result(timeout=WITHIN_S)
            after = client.forward(data, "cross_entropy").result(timeout=WITHIN_S)
            for sampler in (base, client.save_weights_and_get_sampling_client().result(timeout=WITHIN_S)):
                sampled = sampler.sample(text_input(0, 5), 1, params).result(timeout=WITHIN_S)
                assert len(sampled.sequences[0].tokens) == 4
            again = client.save_state("behind")
            assert not saved.future().done()
        finally:
            gate.open.set()
        path = saved.result().path
        assert np.abs(logprobs(after)[0] - before[0]).max() > 1e-3
        assert_close(scores(service.create_training_client_from_state(again.result().path), data), logprobs(after))
        if kind == "save_state":
            assert_close(scores(service.create_training_client_from_state(path), data), before)
