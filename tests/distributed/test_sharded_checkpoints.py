"""A server whose two workers share all weights saves them together: complete or not at all, whoever fails or dies while
they write."""

import itertools
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.acceptance.bad_target import GOOD
from tests.acceptance.conftest import API_KEY
from tests.acceptance.raw import RawModel
from tests.acceptance.talking import RAW_STEP, logprobs
from tests.bases import write_decoder
from tests.extent import slow
from tests.running import START_S, Server, serving
from tinsmith.protocol.place import writer_of

LIMIT = 2 * 2**20
"""Bytes of a file that a worker may write whose disk is full: a part of the weights."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests here, which leave it as it was.

    A checkpoint has about 40 MB, so that there is a middle of writing it.
    """
    directory = tmp_path_factory.mktemp("server")
    write_decoder(
        "qwen3", directory / "text", num_hidden_layers=4, hidden_size=192, intermediate_size=1024, head_dim=32
    )
    workers = ["--workers", "2", "--shard", "weights", "--sampler", "none", "--device", "cpu"]
    with serving(directory, "--base-model", f"text={directory / 'text'}", *workers) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client with a key."""
    server.wait_for_health()
    with server.client() as client:
        client.headers["X-API-Key"] = API_KEY
        yield client


def scores(model: RawModel, seq_id: int) -> list[float]:
    """Log-probabilities of a good datum."""
    found: list[float] = logprobs(model.output(model.forward_backward(seq_id, GOOD, forward_only=True)))[0].tolist()
    return found


def scores_at(http: httpx.Client, path: object) -> list[float]:
    """The same with the weights of a checkpoint."""
    return scores(RawModel(http, "text", path=str(path)), 1)


def step(model: RawModel, seq_id: int) -> None:
    """With two numbers."""
    model.forward_backward(seq_id, GOOD)
    assert "metrics" in model.result(model.optim_step(seq_id + 1, RAW_STEP))


def trained(http: httpx.Client) -> tuple[RawModel, list[float]]:
    """A model after one step, which is saved as `whole`, and what it computes; its next number is 5."""
    model = RawModel(http, "text", rank=0)
    step(model, 1)
    assert model.result(model.save(3, "whole"))["path"] == f"tinker://{model.model_id}/weights/whole"
    return model, scores(model, 4)


def checkpoints(server: Server, finished: bool) -> set[str]:
    """What is complete in the data directory, or what is not."""
    names = {path.name for path in (server.log.parent / "data" / "checkpoints").iterdir()}
    return {name for name in names if name.startswith(".") != finished}


def exists(http: httpx.Client, path: object) -> bool:
    """Whether there is a checkpoint."""
    return http.post("weights_info", json={"tinker_path": path}).status_code == 200


def after_the_end(http: httpx.Client, request_id: str) -> dict[str, object]:
    """The result of an operation that waits for new workers: longer, perhaps, than the server holds a poll."""
    deadline = time.monotonic() + START_S
    while (reply := http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
        assert time.monotonic() < deadline
    result: dict[str, object] = reply.json()
    return result


@contextmanager
def limited(pid: int, size: int) -> Iterator[None]:
    """Let a process write no file beyond a size."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writes", [True, *slow(False)])  # `tests/worker/test_joint_saves.py` has both
def test_a_disk_without_room_for_one_worker_fails_the_save_of_all_and_nothing_else(
    server: Server, http: httpx.Client, writes: bool
) -> None:
    """Whether that is the worker that makes a checkpoint of the parts or the other."""
    model, expected = trained(http)
    rank = next(rank for rank in range(2) if (rank == writer_of(model.model_id, 2)) == writes)
    with limited(server.worker_pids()[rank], LIMIT):
        failed = model.result(model.save(5, "none"))
    path = f"tinker://{model.model_id}/weights/none"
    assert failed["category"] == "server"
    assert str(failed["error"]).startswith(
        f"worker {rank} of 2: {path} could not be written: [Errno 27] File too large"
    )
    assert (checkpoints(server, finished=False), exists(http, path)) == (set(), False)
    assert scores(model, 6) == expected
    saved = model.result(model.save(7, "none"))
    step(model, 8)  # a step that is taken does not change what was saved
    again = RawModel(http, "text", path=str(saved["path"]))
    assert scores(again, 1) == expected
    step(again, 2)
    assert scores(again, 4) == scores(model, 10)


def kill_in_a_save(server: Server, rank: int, sign: str, model: RawModel, seq_id: int) -> str | None:
    """Save, and kill a worker as soon as there is such a file, which is not for long, so it looks without a pause.

    Returns the request of the save, or None if a busy machine let us look only afterwards.
    """
    pid, before, deadline = server.worker_pids()[rank], checkpoints(server, finished=True), time.monotonic() + START_S
    request_id = model.save(seq_id, f"cut {seq_id}")
    while checkpoints(server, finished=True) <= before:
        if any((server.log.parent / "data" / "checkpoints").glob(f".writing-*-joint/{sign}")):
            os.kill(pid, signal.SIGKILL)
            return request_id
        assert time.monotonic() < deadline
    return None


def wait_until_clean(server: Server) -> None:
    """What the dead have left goes when the next workers are there."""
    deadline = time.monotonic() + START_S
    while checkpoints(server, finished=False):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_save_that_a_worker_dies_in_is_made_again_by_the_next_workers(server: Server, http: httpx.Client) -> None:
    """All parts are there, and it makes a checkpoint of them. Nothing is left of the first attempt."""
    model, expected = trained(http)
    attempts = (kill_in_a_save(server, 0, "manifest.json", model, seq_id) for seq_id in itertools.count(5))
    saved = after_the_end(http, next(filter(None, attempts)))
    assert scores_at(http, saved["path"]) == expected
    wait_until_clean(server)


def test_a_save_of_which_parts_were_written_is_made_again_by_the_replay(server: Server, http: httpx.Client) -> None:
    """The model comes back from the save before, and takes its last step again."""
    cut = None
    while cut is None:
        model, _ = trained(http)
        step(model, 5)
        expected = scores(model, 7)
        cut = kill_in_a_save(server, 1, "*", model, 8)
    saved = after_the_end(http, cut)
    assert scores_at(http, saved["path"]) == expected
    wait_until_clean(server)
