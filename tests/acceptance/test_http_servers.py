"""Several HTTP servers in front of one engine: any answers any request, and each may die.

Invariant: Whichever HTTP server takes an operation or a sample, any other answers the poll, limits and metering hold
over all, and one that is killed loses nothing.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.raw import GOOD, RawModel
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.acceptance.test_keys import add_key, used
from tests.databases import run_sql
from tests.extent import amount, slow
from tests.running import START_S, Server, tinsmith_here

COUNT = 3
SERVERS = ["--http-servers", str(COUNT)]
SHORT = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])


@contextmanager
def each_of(server: Server, key: str = "tml-acceptance") -> Iterator[list[httpx.Client]]:
    """A client of each HTTP server, with one connection that stays: the others are stopped while it is opened."""
    pids = server.http_pids(COUNT)
    server.wait_for_health()
    with ExitStack() as stack:
        clients, headers = [], {"X-API-Key": key}
        for pid in pids:
            limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
            http = stack.enter_context(
                httpx.Client(base_url=f"{server.url}/api/v1", timeout=START_S, limits=limits, headers=headers)
            )
            others = [other for other in pids if other != pid]
            for other in others:
                os.kill(other, signal.SIGSTOP)
            assert http.get("livez").status_code == 200
            for other in others:
                os.kill(other, signal.SIGCONT)
            clients.append(http)
        port = int(server.url.rpartition(":")[2])
        held = [[each for each in psutil.Process(pid).net_connections("tcp") if each.raddr] for pid in pids]
        assert [[each.laddr.port for each in own] for own in held] == [[port]] * COUNT
        yield clients


def through(model: RawModel, http: httpx.Client) -> RawModel:
    """The same model by another client."""
    other = object.__new__(RawModel)
    other.http, other.model_id = http, model.model_id
    return other


def sampled(http: httpx.Client, sampler: str, seq_id: int, count: int = 1, tokens: int = 3) -> httpx.Response:
    """Submit a sample."""
    asked = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": tokens, "stop": []},
        "num_samples": count,
        "sampling_session_id": sampler,
        "seq_id": seq_id,
    }
    return http.post("asample", json=asked)


def new_sampler(http: httpx.Client, session_id: str) -> str:
    asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "text"}
    sampler: str = http.post("create_sampling_session", json=asked).json()["sampling_session_id"]
    return sampler


def test_any_http_server_answers_any_request(
    text_only: list[str], tmp_path: Path, database: Callable[[Path], object]
) -> None:
    """What comes to one is known to the others, in any order; what is counted is counted once."""
    database(tmp_path / "data")
    with ready(tmp_path, *text_only, *SERVERS, "--long-poll-s", "2") as server, each_of(server) as clients:
        first, second, third = clients
        model = RawModel(first, "text")
        expected = RawModel(second, "text")
        expected.forward_backward(1, GOOD)
        norm = expected.grad_norm(expected.optim_step(2, RAW_STEP))

        step = through(model, second).optim_step(2, RAW_STEP)  # before what it waits for
        assert third.post("retrieve_future", json={"request_id": step}).status_code == 408
        with ThreadPoolExecutor() as threads:
            norms = [threads.submit(through(model, http).grad_norm, step) for http in (first, third)]
            passed = through(model, second).forward_backward(1, GOOD)
            assert [each.result() for each in norms] == [norm, norm]
        assert through(model, third).forward_backward(1, GOOD) == passed  # a repeat runs nothing
        assert through(model, first).output(passed).metrics == expected.output(f"{expected.model_id}/1").metrics
        assert through(model, second).scores(3) == expected.scores(3)
        many = GOOD * 500  # which the process beside the HTTP server parses
        large = through(model, second).forward_backward(4, many)
        metrics = through(model, third).output(large).metrics
        assert metrics == expected.output(expected.forward_backward(4, many)).metrics

        session = model.model_id.partition(":")[0]
        sampler = new_sampler(first, session)
        started = sampled(second, sampler, 1)
        assert sampled(third, sampler, 1).json() == started.json()
        assert "digest" in sampled(first, sampler, 1, tokens=4).json()["detail"]
        asked = {"target": {"sampling_session_id": sampler, "cloned_sampler_id": 0}, "prev_cursor": 0}
        told = third.post("retrieve_futures", json=asked | {"retrieved_request_ids": []}).json()["completions"]
        assert [each["request_id"] for each in told] == [started.json()["request_id"]]
        results = [http.post("retrieve_future", json={"request_id": told[0]["request_id"]}).content for http in clients]
        assert results == [results[0]] * COUNT

        beat = {"session_id": session, "type": "session_heartbeat"}
        assert [http.post("session_heartbeat", json=beat).status_code for http in clients] == [200] * COUNT
        assert second.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}}).status_code == 200
        assert [http.post("session_heartbeat", json=beat).status_code for http in clients] == [410] * COUNT

        texts = [httpx.get(f"{server.url}/metrics").text for _ in range(5)]
        lines = [next(line for line in text.splitlines() if 'status="410"' in line) for text in texts]
        assert lines == ['tinsmith_refusals_total{reason="gone",status="410"} 3.0'] * 5
    counted = "SELECT kind, status, count(*) FROM commands WHERE seq_id < 3 GROUP BY 1, 2 ORDER BY 1"
    rows = run_sql(tmp_path / "data", counted)
    assert rows == [("create_model", "done", 2), ("forward_backward", "done", 2), ("optim_step", "done", 2)]


def rounds(
    service: tinker.ServiceClient, client: tinker.TrainingClient, count: int
) -> tuple[list[float], list[list[int]]]:
    """Steps and samples in turn, several submitted at a time; losses and tokens."""
    losses, tokens = [], []
    sampler = service.create_sampling_client(base_model="text").result()
    for number in range(count):
        futures: list[tuple[Any, Any]] = []
        for part in range(3):
            data = [datum(text_input(10 * number + part, 40), part)]
            futures.append((client.forward_backward(data, "cross_entropy"), client.optim_step(RAW_STEP)))
        samples = [sampler.sample(text_input(part, 5), 1, SHORT) for part in range(3)]
        for passed, step in futures:
            losses.append(passed.result(timeout=START_S).metrics["loss:sum"])
            step.result(timeout=START_S)
        tokens += [list(each.result(timeout=START_S).sequences[0].tokens) for each in samples]
        published = client.save_weights_and_get_sampling_client().result(timeout=START_S)
        tokens.append(list(published.sample(text_input(1, 5), 1, SHORT).result(timeout=START_S).sequences[0].tokens))
    return losses, tokens


@pytest.fixture(scope="module")
def several(text_only: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready(tmp_path_factory.mktemp("several"), *text_only, *SERVERS) as running:
        yield running


def test_applications_get_the_same_answer_of_each(several: Server) -> None:
    """Whole or streamed; and the sample of one that goes away is given up, wherever it asked."""
    asked = {"model": "text", "prompt": "hello", "max_tokens": 20, "temperature": 0.0}
    with each_of(several) as clients:
        answers = [http.post(f"{several.url}/v1/completions", json=asked).json() for http in clients]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts == [texts[0]] * COUNT
        assert texts[0]
        for http in clients:
            with http.stream("POST", f"{several.url}/v1/completions", json=asked | {"stream": True}) as reply:
                events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
            assert events.pop() == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == texts[0]
        long = asked | {"stream": True, "max_tokens": 900, "n": 32}
        with clients[0].stream("POST", f"{several.url}/v1/completions", json=long) as reply:
            assert next(reply.iter_lines())
        given_up = time.monotonic()
        while "tinsmith_pending_samples 0.0" not in httpx.get(f"{several.url}/metrics").text:
            assert time.monotonic() < given_up + START_S
            time.sleep(0.1)


def test_one_that_is_started_again_answers_nothing_before_it_knows_the_base_models(several: Server) -> None:
    """Here the server that could tell it is stopped: a client waits, and is not refused."""
    with several.client() as http:
        old = several.http_pids(COUNT)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        while set(several.http_pids(COUNT)) & set(old):
            time.sleep(0.01)
        os.kill(several.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(http.get, "get_server_capabilities")
            assert not wait([asked], timeout=5).done
            os.kill(several.pid, signal.SIGCONT)
            assert [each["model_name"] for each in asked.result().json()["supported_models"]] == ["text"]


@pytest.mark.parametrize("database", ["sqlite", *slow("postgresql")], indirect=True)  # above with both
def test_http_servers_that_are_killed_lose_nothing(
    text_only: list[str], tmp_path: Path, database: Callable[[Path], object]
) -> None:
    """One after the other, under training and sampling: the curve is that of a run that nobody disturbs."""
    database(tmp_path / "data")
    count, killed = amount(6, 60), 0
    with ready(tmp_path, *text_only, *SERVERS) as server, connect(server) as service:
        expected = rounds(service, train(service, "text"), count)
        disturbed = train(service, "text")
        server.http_pids(COUNT)
        processes, ended = (server.pid, server.engine_pid(), server.worker_pid()), Event()

        def kill_them() -> int:
            killed = 0
            while not ended.wait(0.2):
                for pid in server.http_pids(COUNT)[killed % COUNT :][:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            return killed

        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(kill_them)
            try:
                found = rounds(service, disturbed, count)
            finally:
                ended.set()
            killed = killing.result()
        assert found == expected
        assert killed > 0
        assert processes == (server.pid, server.engine_pid(), server.worker_pid())
    rows = run_sql(tmp_path / "data", "SELECT model_id, status, count(*) FROM commands WHERE seq_id > 0 GROUP BY 1, 2")
    assert sorted(row[1:] for row in rows) == [("done", 7 * count)] * 2
    trained, log = "SELECT sum(trained_tokens) FROM usage", "SELECT sum(tokens) FROM commands"
    assert run_sql(tmp_path / "data", trained) == run_sql(tmp_path / "data", log)


def test_http_servers_outlive_the_engine_and_end_with_the_server(text_only: list[str], tmp_path: Path) -> None:
    with ready(tmp_path, *text_only, *SERVERS) as server:
        with connect(server) as service:
            model = train(service, "text")
            passed = model.forward_backward(GOOD, "cross_entropy").result()
            pids = server.http_pids(COUNT)
            os.kill(server.engine_pid(), signal.SIGKILL)
            step = model.optim_step(RAW_STEP)
            again = train(service, "text").forward_backward(GOOD, "cross_entropy").result(timeout=START_S)
            assert again.metrics == passed.metrics
            assert step.result(timeout=START_S).metrics is not None
            assert server.http_pids(COUNT) == pids
            os.kill(server.pid, signal.SIGKILL)  # and the port is free again
            server.start_again()
            later = model.forward_backward(GOOD, "cross_entropy").result(timeout=START_S)
            assert later.metrics["loss:sum"] < passed.metrics["loss:sum"]
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        pids = server.http_pids(COUNT)
        with server.client() as http, ThreadPoolExecutor(1) as thread:
            model_id = RawModel(http, "text").model_id
            held = http.post("optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}}).json()
            poll = thread.submit(http.post, "retrieve_future", json={"request_id": held["request_id"]})
            server.wait_for_metric("tinsmith_polls_waiting 1.0")
            server.process.terminate()
            assert poll.result().status_code == 408
        assert server.process.wait(timeout=START_S) == 0
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_one_that_hangs_is_killed_and_started_again(text_only: list[str], tmp_path: Path) -> None:
    with ready(tmp_path, *text_only, *SERVERS, "--engine-hung-s", "2", "--engine-silent-s", "2") as server:
        hung, *others = server.http_pids(COUNT)
        server.wait_for_health()
        time.sleep(2)  # it has shown life, even on a busy machine
        os.kill(hung, signal.SIGSTOP)
        server.wait_for_log("an HTTP server has shown no sign of life")
        deadline = time.monotonic() + START_S
        while hung in (pids := server.http_pids(COUNT)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert set(others) < set(pids)
        with each_of(server) as clients:
            assert [http.get("healthz").status_code for http in clients] == [200] * COUNT


def test_limits_of_a_tenant_hold_over_all_http_servers(text_only: list[str], tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    key = add_key(data_dir, "team", "--max-parallel", "4", "--max-models", "2", "--budget-tokens", "2000")
    with ready(tmp_path, *text_only, *SERVERS) as server, each_of(server, key) as clients:
        session = clients[0].post("create_session", json={}).json()["session_id"]
        sampler = new_sampler(clients[0], session)
        slow = [sampled(http, sampler, number, 2, 400) for number, http in enumerate(clients[:2])]
        assert [reply.status_code for reply in slow] == [200, 200]
        for number, http in enumerate(clients):
            refused = sampled(http, sampler, 10 + number)
            assert refused.status_code == 429, refused.text
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["detail"].startswith("4 sequences of tenant 'team' are unfinished")
        for reply in slow:
            while (
                clients[2].post("retrieve_future", json={"request_id": reply.json()["request_id"]}).status_code == 408
            ):
                pass
        assert used(server, key, {"sampling_sample"})["sampling_sample"] == 2 * 2 * 400
        told = sampled(clients[2], sampler, 20, 1, 398).json()["detail"]
        assert told.startswith("tenant 'team' has used 1,606 tokens today and 0 are reserved")

        bodies = [
            {"session_id": session, "model_seq_id": number, "base_model": "text", "lora_config": {"rank": 4}}
            for number in range(COUNT)
        ]
        made = [http.post("create_model", json=body) for http, body in zip(clients, bodies, strict=True)]
        assert [reply.status_code for reply in made] == [200, 200, 429]
        assert "key 'team' allows 2" in made[2].json()["detail"]
        assert tinsmith_here("keys", "revoke", "team", "--data-dir", str(data_dir)).returncode == 0
        deadline = time.monotonic() + START_S
        while {http.get("get_server_capabilities").status_code for http in clients} != {401}:
            assert time.monotonic() < deadline
