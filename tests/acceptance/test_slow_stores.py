"""A checkpoint store that takes its time: what one client saves must not stall the training and sampling of others.

Invariant: A save or a load that takes its time keeps nobody from training and sampling; the model that is saved goes on when its copy is
there, and what is saved is what it was.
Also: `tests/engine/test_saves.py`, `tests/worker/test_samples.py`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
import numpy as np
import pytest
import tinker
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from tinker import types
from werkzeug.serving import make_server

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, assert_close, datum, logprobs, scores, text_input, train
from tests.running import Server, serving

WITHIN_S = 120.0
"""How long others may take beside a save that is held for as long as the test wants: one that they had to wait for would take all of it. So
it may be long, which it must on a busy machine."""


class Gate:
    """An object store whose uploads wait while the gate is closed."""

    def __init__(self, store: Callable[..., Iterable[bytes]]) -> None:
        self.store = store
        self.open = threading.Event()
        self.open.set()
        self.waited_for = threading.Event()
        """Set once an upload waits."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and not self.open.is_set():
            self.waited_for.set()
            self.open.wait()
        return self.store(environ, start_response)


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
        boto3.resource("s3").create_bucket(Bucket="slow")
        yield gate
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def slow_server(gate: Gate, text_only: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps its checkpoints there."""
    with serving(tmp_path_factory.mktemp("slow"), *text_only, "--checkpoint-root", "s3://slow/checkpoints") as server:
        server.wait_for_health()
        yield server


def save_state(client: tinker.TrainingClient) -> Any:
    return client.save_state("held")


def save_external(client: tinker.TrainingClient) -> Any:
    return client.save_weights_external("held")


@pytest.mark.parametrize("save", [save_state, save_external])
def test_a_save_that_takes_its_time_stalls_nobody_else_and_its_own_model_no_longer_than_its_copy(
    slow_server: Server, gate: Gate, save: Callable[[tinker.TrainingClient], Any]
) -> None:
    """The model trains and is sampled meanwhile, and what is saved is what it was. Its next save waits for the one before."""
    data, params = [datum(text_input(1, 12))], types.SamplingParams(max_tokens=4, stop=[])
    with (
        tinker.ServiceClient(base_url=slow_server.url, api_key=API_KEY) as service,
        tinker.ServiceClient(base_url=slow_server.url, api_key=API_KEY) as neighbour,
    ):
        client, other = train(service, "text"), train(neighbour, "text")
        base = neighbour.create_sampling_client(base_model="text").result()
        for model in (client, other):
            model.forward_backward(data, "cross_entropy").result()
        client.optim_step(RAW_STEP).result()
        before = scores(client, data)
        gate.waited_for.clear()
        gate.open.clear()
        saved = save(client)
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
        if save is save_state:
            assert_close(scores(service.create_training_client_from_state(path), data), before)
