"""What the server tells of the reports of its engine: to Prometheus, and in its status."""

import socket
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import LIGHT_ENGINE, Served, refused, served
from tinsmith.config import Config, ServerConfig
from tinsmith.errors import ConfigError
from tinsmith.observing.metrics import Number
from tinsmith.protocol.serving import Status
from tinsmith.server.activity import Activity
from tinsmith.server.app import create_app, http_config
from tinsmith.server.engine_program import EngineProgram
from tinsmith.server.main import run_server
from tinsmith.server.routes.metrics import metrics_app

TOKENS = "tinsmith_sampled_tokens_total"
MODEL = {"model_id": "s:train:0", "base_model": "tiny", "queued": 2, "trained_tokens": 70}


def report(*numbers: Number, loaded: bool = True, pid: int = 1) -> Status:
    worker = {"pid": pid, "device": "cpu", "state": "ready", "pass_tokens": 90}
    return Status([MODEL] if loaded else [], [worker], list(numbers))


def told(text: bytes) -> dict[str, float]:
    """Values by name and labels, as Prometheus reads them."""
    families = text_string_to_metric_families(text.decode())
    return {
        each.name + "".join(f" {label}={value}" for label, value in sorted(each.labels.items())): each.value
        for family in families
        for each in family.samples
    }


async def test_metrics_are_for_programs_on_this_machine_only(server: Served) -> None:
    elsewhere = httpx.ASGITransport(create_app(server.front), client=("203.0.113.7", 4000))
    async with httpx.AsyncClient(transport=elsewhere, base_url="http://localhost") as client:
        assert "--metrics-address gives it an address" in refused(await client.get("/metrics"), 404)
    assert (await server.client.get("/metrics")).status_code == 200
    own = httpx.ASGITransport(metrics_app(server.front), client=("203.0.113.7", 4000))
    async with httpx.AsyncClient(transport=own, base_url="http://localhost") as client:
        assert "tinsmith_engine_ready 0.0" in (await client.get("/metrics")).text
        assert (await client.get("/api/v1/status")).status_code == 404


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"])
async def test_clients_of_a_proxy_cannot_say_that_they_are_here(tmp_path: Path, header: str) -> None:
    """The client is in the network of the trusted proxies too, as 10.0.0.5."""
    async with served(tmp_path, trusted_proxies=["10.0.0.0/24"]) as server:
        http = http_config(create_app(server.front), server.hub.config.server)
        http.load()
        for proxy in ("10.0.0.9", "127.0.0.1"):
            behind = httpx.ASGITransport(http.loaded_app, client=(proxy, 4000))
            async with httpx.AsyncClient(transport=behind, base_url="http://localhost") as client:
                assert (await client.get("/metrics", headers={header: "127.0.0.1, 10.0.0.5"})).status_code == 404
                assert (await client.get("/metrics")).status_code == (200 if proxy == "127.0.0.1" else 404)


def test_an_address_for_metrics_that_is_in_use_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerConfig(port=0, metrics_address=f"127.0.0.1:{port}")
        config = Config(base_models=["tiny=/nowhere"], data_dir=str(tmp_path), server=server)
        refusal = f"port={port}: .* with --metrics-address 127.0.0.1:{port + 1}$"
        with closing(EngineProgram(LIGHT_ENGINE)) as engine, pytest.raises(ConfigError, match=refusal):
            run_server(config, engine)


async def test_a_loaded_model_is_told_of_and_one_that_is_gone_is_not(server: Served) -> None:
    of_model = ("tinsmith_model_sampled_tokens_total", {"worker": "0", "model": "s:train:0"}, 5.0)
    server.hub.take(report(of_model))
    found = told((await server.client.get("/metrics")).content)
    assert found["tinsmith_model_trained_tokens_total base_model=tiny model=s:train:0"] == 70
    assert found["tinsmith_model_queued_operations base_model=tiny model=s:train:0"] == 2
    assert found["tinsmith_worker_pass_tokens_total worker=0"] == 90
    assert found["tinsmith_model_sampled_tokens_total model=s:train:0 worker=0"] == 5
    server.hub.take(report(of_model, loaded=False))
    assert [name for name in told((await server.client.get("/metrics")).content) if "s:train:0" in name] == []
    await server.hub.engine_absent("it has ended")
    assert [name for name in told((await server.client.get("/metrics")).content) if "worker=" in name] == []


async def test_samples_and_polls_that_wait_are_counted_when_somebody_looks(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        server.hub.samples.add("s/0", 3, 100)
        server.hub.queued.admit("s:train:0", 0, 70)
        found = told((await server.client.get("/metrics")).content)
        assert (found["tinsmith_pending_samples"], found["tinsmith_queued_bytes"]) == (3, 70)
        assert found["tinsmith_pending_sample_age_seconds"] > 0
        server.hub.samples.remove("s/0")
        found = told((await server.client.get("/metrics")).content)
        assert (found["tinsmith_pending_samples"], found["tinsmith_pending_sample_age_seconds"]) == (0, 0)


def test_rates_go_on_when_a_worker_or_the_engine_counts_from_zero_again() -> None:
    """30 tokens, then 12 and 40 of other workers, then 50 of another engine's: 132 in the last minute."""
    counted = Activity()
    for pid, tokens in ((1, 10), (1, 30), (2, 12), (3, 40)):
        counted.take(report((TOKENS, {"worker": "0", "base_model": "tiny"}, tokens), pid=pid))
    counted.clear()
    counted.take(report((TOKENS, {"worker": "0", "base_model": "tiny"}, 50), pid=3))
    assert counted.describe()["tokens_per_second"] == {"training": 0, "sampling": 132 / 60}


def test_rates_are_of_the_last_minute_and_those_of_all_workers() -> None:
    now = 1000.0
    counted = Activity(lambda: now)
    for now, tokens in ((1000.0, 600), (1030.0, 660), (1070.0, 720)):
        workers = [(TOKENS, {"worker": rank, "base_model": "tiny"}, float(tokens)) for rank in ("0", "1")]
        waits = ("tinsmith_worker_activity_seconds_total", {"worker": "0", "activity": "sampling"}, now)
        counted.take(report(*workers, waits))
    shown = counted.describe()
    assert shown["tokens_per_second"]["sampling"] == 2 * (720 - 600) / 60
    assert shown["worker_time"] == {"sampling": 1.0}
    now = 1131.0
    assert counted.describe()["tokens_per_second"]["sampling"] == 0
