"""`tinsmith status` prints names as they are."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from tinsmith.commands.status import fetch_status, print_status
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation import print_metrics

SESSION = "0c9c5a3e-5f2b-4b9e-8b0e-3f6b1f0f8f53"


def test_names_are_no_markup_and_no_emoji() -> None:
    console = Console(file=StringIO(), record=True, width=200, highlight=False)
    base = {"name": "org/[bold]x:car:", "architecture": "qwen3", "max_context": 4096, "takes_images": False}
    model = {"model_id": f"{SESSION}:train:0", "base_model": base["name"], "queued": 1, "trained_tokens": 2000}
    status = {
        "workers": [{"pid": 4711, "device": "cuda:0", "state": "ready", "pass_tokens": 54321}],
        "version": "0.1",
        "engine": {"state": "starting", "reason": "loading org/[bold]x:car:", "busy_s": 72.4},
        "base_models": [base],
        "models": [model],
        "samples": {"running": 1, "waiting": 0},
        "tokens_per_second": {"training": 1.0, "sampling": 2.0},
        "memory_bytes": {"resident": 2**20},
        "graphs": {"compiled": 1200, "captured": 7},
    }
    print_status(status, console)
    assert [line.rstrip() for line in console.export_text().splitlines()] == [
        "Tinsmith 0.1, loading org/[bold]x:car:",
        "workers",
        "process  device  state  tokens of passes",
        "4711     cuda:0  ready  54,321",
        "base models",
        "name              architecture  context  images",
        "org/[bold]x:car:  qwen3         4,096    no",
        "loaded models",
        "model                                         base model        queued  tokens trained",
        f"{SESSION}:train:0  org/[bold]x:car:  1       2,000",
        "samples: 1 running, 0 waiting",
        "tokens per second, last minute: 1.0 training, 2.0 sampling",
        "engine memory: 1 MiB resident",
        "graphs of operations: 1,200 compiled, 7 captured",
    ]


def test_an_evaluated_path_is_shown_as_it_is() -> None:
    console = Console(file=StringIO(), record=True, width=40)
    path = f"tinker://{SESSION}:train:0/sampler_weights/[best]-000001"
    print_metrics(path, {"env/:car:": 1.0}, console)
    lines = console.export_text().splitlines()
    assert lines[0] == path
    assert "│ env/:car: │ 1     │" in lines


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """The URL of something that gives one connection this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def http(content: object) -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH\r\n\r\n", b"", http({}), http([1])])
def test_what_is_no_tinsmith_server_is_named(reply: bytes) -> None:
    with answering(reply) as url, pytest.raises(ConfigError, match=f"^no Tinsmith server answers at {url}: "):
        fetch_status(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://a b"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^no Tinsmith server answers at {url}: "):
        fetch_status(url)


def test_a_url_with_the_path_of_the_api_is_told_to_leave_it_out() -> None:
    with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url, pytest.raises(ConfigError) as raised:
        fetch_status(f"{url}/api/v1")
    assert str(raised.value) == f"{url}/api/v1 answers 404: is it a Tinsmith server? Leave out /api/v1"
