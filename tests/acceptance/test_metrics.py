"""`/metrics` of a real server, read as Prometheus reads it.

Invariant: `/metrics` and `tinsmith status` tell the same numbers, and models that are gone have none.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.running import START_S, Server, tinsmith_here
from tinsmith.observing.metrics import Number


def numbers(url: str) -> list[Number]:
    """All numbers that Prometheus gets at this address; no two have the same name and labels."""
    reply = httpx.get(f"{url}/metrics", timeout=60)
    assert (reply.status_code, reply.headers["content-type"]) == (200, CONTENT_TYPE_LATEST)
    found = [
        (each.name, each.labels, each.value)
        for family in text_string_to_metric_families(reply.text)
        for each in family.samples
    ]
    assert len({(name, tuple(sorted(labels.items()))) for name, labels, _ in found}) == len(found)
    return found


def total(found: list[Number], name: str, **labels: str) -> float:
    """The sum of all numbers with this name and these labels."""
    return sum(value for each, theirs, value in found if each == name and labels.items() <= theirs.items())


def models(found: list[Number]) -> set[str]:
    return {labels["model"] for _, labels, _ in found if "model" in labels}


def until(url: str, seen: Callable[[list[Number]], bool]) -> list[Number]:
    """The first numbers that `seen` accepts: reports come once a second."""
    while not seen(found := numbers(url)):
        pass
    return found


@pytest.fixture
def fresh(text_only: list[str], tmp_path: Path) -> Iterator[Server]:
    """A server that no test has used before: what that one did might be reported late."""
    with ready(tmp_path, *text_only) as server:
        yield server


def test_everything_a_client_does_is_counted_where_it_happens(fresh: Server) -> None:
    def count(found: list[Number], name: str, **labels: str) -> float:
        return total(found, name, **labels) - total(before, name, **labels)

    before = numbers(fresh.url)
    passes = {"base_model": "text", "direction": "backward"}
    expected: list[tuple[float, str, dict[str, str]]] = [
        (150, "tinsmith_trained_tokens_total", {"base_model": "text"}),
        (2, "tinsmith_operations_total", {"kind": "forward_backward", "outcome": "ok"}),
        (5, "tinsmith_operations_total", {}),
        (1, "tinsmith_passes_total", passes),
        (150, "tinsmith_pass_tokens_total", passes),
        (50, "tinsmith_pass_tokens_total", {"direction": "forward"}),
        (200, "tinsmith_worker_pass_tokens_total", {"worker": "0"}),
        (1, "tinsmith_publishes_total", {"base_model": "text", "worker": "0"}),
        (2, "tinsmith_samples_total", {"outcome": "ok"}),
        (48, "tinsmith_sampled_tokens_total", {"base_model": "text"}),
        (80, "tinsmith_prompt_tokens_total", {}),
    ]
    for kind in ("create_model", "optim_step", "save_weights_for_sampler"):
        expected.append((1, "tinsmith_operations_total", {"kind": kind, "outcome": "ok"}))
        expected.append((1, "tinsmith_operation_seconds_count", {"kind": kind, "stage": "run"}))
    activities = ("forward", "backward", "optimizer", "publishing", "sampling", "waiting for requests")

    def have_come(found: list[Number]) -> bool:
        """Whether reports of all processes, each of which comes at its own time, say it all; never more than it."""
        counts = [(count(found, name, **labels), wanted, name) for wanted, name, labels in expected]
        assert [each for each in counts if each[0] > each[1]] == []
        times = [count(found, "tinsmith_worker_activity_seconds_total", activity=each) for each in activities]
        return all(found == wanted for found, wanted, _ in counts) and all(times)

    with connect(fresh) as service:
        client = train(service, "text", rank=8)
        client.forward([datum(text_input(1, 50))], "cross_entropy").result()
        client.forward_backward([datum(text_input(1, 60)), datum(text_input(2, 90))], "cross_entropy").result()
        client.optim_step(RAW_STEP).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=1, stop=[])
        for _ in range(2):  # the second finds the prompt in the cache, but for its last block
            sampler.sample(text_input(3, 40), 3, params).result()
        of_model = {"model": client.model_id, "base_model": "text"}
        after = until(
            fresh.url,
            lambda found: (
                have_come(found) and total(found, "tinsmith_model_sampled_tokens_total", model=client.model_id) == 48
            ),
        )
        assert total(after, "tinsmith_model_trained_tokens_total", **of_model) == 150
        assert total(after, "tinsmith_model_queued_operations", **of_model) == 0
    assert count(after, "tinsmith_pass_room_tokens_total", **passes) >= 150
    assert count(after, "tinsmith_prompt_tokens_total", cached="yes") > 0
    assert total(after, "tinsmith_sampler_places", base_model="text") > 0
    assert total(after, "tinsmith_worker_memory_bytes", place="resident") > 2**20
    assert (total(after, "tinsmith_engine_ready"), total(after, "tinsmith_worker_ready", device="cpu")) == (1, 1)
    assert [name for name, _, _ in after if name.startswith("tinsmith_gpu_")] == []
    assert client.model_id not in models(until(fresh.url, lambda found: client.model_id not in models(found)))


def test_a_trace_shows_operations_samples_and_what_the_worker_did(
    server: Server, service: tinker.ServiceClient, tmp_path: Path
) -> None:
    """Of the last minutes, in a file for Perfetto."""
    client = service.create_lora_training_client("text", rank=4).result()
    client.forward_backward([datum(text_input(1, 8))], "cross_entropy").result()
    request_id = f"{client.model_id}/"
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(text_input(2, 4), 1, types.SamplingParams(max_tokens=2)).result()
    file = tmp_path / "trace.json"

    def shown() -> list[dict[str, Any]]:
        assert tinsmith_here("trace", str(file), server.url, "--minutes", "5").returncode == 0
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        return events

    deadline = time.monotonic() + START_S
    while not (
        any(each["name"] == "sample" for each in shown())
        and any(
            request.startswith(request_id)
            for each in shown()
            if each.get("cat") == "passes"
            for request in each["args"]["requests"]
        )
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    names = {(each.get("cat"), each["name"]) for each in shown()}
    assert {("operations", "forward_backward"), ("device", "backward"), ("device", "sampling")} <= names


def test_status_and_metrics_tell_the_same(server: Server, service: tinker.ServiceClient) -> None:
    client = train(service, "text", rank=8)
    client.forward_backward([datum(text_input(1, 60))], "cross_entropy").result()
    found = until(server.url, lambda found: client.model_id in models(found))
    status = server.wait_for_status(lambda status: client.model_id in {model["model_id"] for model in status["models"]})
    assert {(each["model_id"], each["trained_tokens"]) for each in status["models"]} == {
        (labels["model"], value) for name, labels, value in found if name == "tinsmith_model_trained_tokens_total"
    }
    assert status["workers"][0]["pass_tokens"] == total(found, "tinsmith_worker_pass_tokens_total")
    assert sum(status["worker_time"].values()) > 0.999
    assert status["graphs"].keys() == {labels["kind"] for name, labels, _ in found if name == "tinsmith_graphs"}


def test_refusals_are_counted_by_reason(server: Server) -> None:
    def refused(reason: str, status: str) -> float:
        return total(numbers(server.url), "tinsmith_refusals_total", reason=reason, status=status)

    before = refused("not_found", "404"), refused("user", "400")
    with server.client() as client:
        assert client.get("sessions/nowhere").status_code == 404
        assert client.post("create_session", content=b"[").status_code == 400
    assert (refused("not_found", "404"), refused("user", "400")) == (before[0] + 1, before[1] + 1)


def test_metrics_have_an_address_of_their_own_and_the_log_is_json_with_ids_if_wanted(
    text_only: list[str], tmp_path: Path
) -> None:
    options = ["--metrics-address", "127.0.0.1:0", "--log-format", "json"]
    with ready(tmp_path, *text_only, *options) as server:
        server.wait_for_log("metrics at http://")
        address = server.log.read_text().partition("metrics at ")[2].partition("/metrics")[0]
        assert total(numbers(address), "tinsmith_engine_ready") == 1
        assert httpx.get(f"{address}/api/v1/status").status_code == 404
        with connect(server) as service:
            model_id = train(service, "text", rank=8).model_id
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {line["process"] for line in lines} == {"server", "engine", "worker"}
    created = [line for line in lines if line.get("request") == f"{model_id}/0"]
    session_id = model_id.partition(":")[0]
    ids = [(line["process"], line["model"], line["session"], line["tenant"]) for line in created]
    assert ids == [("engine", model_id, session_id, "local")]
