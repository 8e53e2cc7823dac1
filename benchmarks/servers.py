"""What a benchmark starts: a Tinsmith server with a tiny model, the instant stub, and the SDK's client and datums."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from tests.running import serving
from tinsmith.models.tiny import TinyKind, write_tiny_model

API_KEY = "tml-benchmark"
BASE_MODEL = "tiny"


@contextmanager
def tinsmith_server(
    *options: str, kind: TinyKind = "qwen3", hidden: int = 64, layers: int = 2, vocab: int = 2048
) -> Iterator[str]:
    """Start a server whose base model `BASE_MODEL` is random, of that kind and shape; yields its URL when ready."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model(kind, directory / "model", hidden=hidden, layers=layers, vocab=vocab)
        with serving(
            directory, "--base-model", f"{BASE_MODEL}={directory / 'model'}", "--kv-cache-gib", "0.25", *options
        ) as server:
            server.wait_for_health()
            yield server.url


@contextmanager
def stub_server() -> Iterator[str]:
    """The address of the instant stub, a process too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.stub", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/api/v1/healthz")
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_for(address: str) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):  # it does not listen yet
            httpx.get(address)
            return
        time.sleep(0.05)
    raise TimeoutError(f"{address} does not answer")


@contextmanager
def training_client(url: str, api_key: str = API_KEY) -> Iterator[tinker.TrainingClient]:
    """A new LoRA model of rank 8 on the server at `url`."""
    with tinker.ServiceClient(base_url=url, api_key=api_key) as service:
        yield service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=0).result()


def sdk_datum(tokens: NDArray[np.int32]) -> types.Datum:
    """Next-token prediction on `tokens`; the last position has weight 0."""
    targets = np.append(tokens[1:], 0).astype(np.int64)
    weights = np.append(np.ones(len(tokens) - 1), 0).astype(np.float32)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)


def random_datums(lengths: Sequence[int], vocabulary: int = 1500, seed: int = 0) -> list[types.Datum]:
    """Datums of random tokens."""
    generator = np.random.default_rng(seed)
    return [sdk_datum(generator.integers(0, vocabulary, length).astype(np.int32)) for length in lengths]
