"""A real server with a real engine: ready, killed, restarted, stopped.

Invariant: A dead engine's work ends in clear errors; Ctrl-C ends all processes.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.running import START_S, Server, limited_program, serving


@pytest.fixture
def tiny(family_dir: Callable[[str], Path]) -> list[str]:
    return ["--base-model", f"tiny={family_dir('qwen3')}"]


def is_running(pid: int) -> bool:
    """A process that has ended may still be listed until somebody collects it: then it has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + START_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes(server: Server) -> list[int]:
    """Engine, worker, and the process that parses large bodies."""
    children = psutil.Process(server.pid).children()
    (parser,) = (child.pid for child in children if "tinsmith.server.parser_process" in child.cmdline())
    return [server.engine_pid(), server.worker_pid(), parser]


def test_an_engine_that_dies_is_restarted_and_goes_on_and_ctrl_c_ends_all(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny) as server, server.client() as client, ThreadPoolExecutor() as threads:

        def done(path: str, **body: Any) -> Any:
            request_id = client.post(path, json=body).json()["request_id"]
            return client.post("retrieve_future", json={"request_id": request_id}).json()

        def poll(path: str, body: dict[str, Any]) -> "Future[httpx.Response]":
            """Wait for what does not end."""
            request_id = client.post(path, json=body).json()["request_id"]
            return threads.submit(client.post, "retrieve_future", json={"request_id": request_id})

        server.wait_for_health()
        session_id = client.post("create_session", json={}).json()["session_id"]
        new = {"session_id": session_id, "base_model": "tiny", "lora_config": {"rank": 4}}
        model_id = done("create_model", **new, model_seq_id=0)["model_id"]
        snapshot = done("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)[
            "sampling_session_id"
        ]
        asked = {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": "tiny"}
        base = client.post("create_sampling_session", json=asked).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        endless = {"seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 20_000, "stop": []}}
        # Of seq_id 3 the engine waits for seq_id 2, which never comes.
        held = {"seq_id": 3, "adam_params": {}}
        polls = [poll("asample", endless | {"sampling_session_id": sampler}) for sampler in (snapshot, base)]
        polls.append(poll("optim_step", held | {"model_id": model_id}))
        time.sleep(0.2)
        assert not any(poll.done() for poll in polls)

        worker = server.worker_pid()
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for_end([worker])  # whatever it computes: its device is needed by the next
        # The SDK sends samples again after a 410
        assert [poll.result(timeout=START_S).status_code for poll in polls[:2]] == [410, 410]

        server.wait_for_health()
        done("optim_step", model_id=model_id, seq_id=2, adam_params={})
        assert "metrics" in polls[2].result(timeout=START_S).json()
        statuses = [
            client.post("asample", json=endless | {"sampling_session_id": sampler}).status_code
            for sampler in (snapshot, base)
        ]
        assert statuses == [200, 200]
        model_id = done("create_model", **new, model_seq_id=1)["model_id"]
        waiting, pids = poll("optim_step", held | {"model_id": model_id}), processes(server)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        assert waiting.result(timeout=START_S).status_code == 408
        assert server.process.wait(timeout=START_S) == 0
        assert not any(is_running(pid) for pid in pids)


def test_a_data_dir_has_one_server_and_a_second_ctrl_c_ends_it_at_once(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny, "--shutdown-s", "3600") as server:
        server.wait_for_health()
        with (tmp_path / "second.log").open("w") as log:
            second = Server(log, tmp_path / "data", tiny)
            assert second.process.wait(timeout=START_S) == 2
        assert "is used by another server" in second.log.read_text()
        engine_pid, worker_pid, _ = processes(server)
        os.kill(engine_pid, signal.SIGSTOP)  # it never finishes what it is at
        server.process.send_signal(signal.SIGINT)
        server.wait_for_log("a second Ctrl-C ends it at once")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 128 + signal.SIGINT
        assert not is_running(engine_pid)
        wait_for_end([worker_pid])  # it notices that its engine is gone


def test_a_low_limit_of_open_files_is_raised_and_a_server_that_dies_while_it_loads_leaves_no_process(
    tiny: list[str], tmp_path: Path
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(tmp_path, *tiny, program=limited_program(resource.RLIMIT_NOFILE, 256)) as server:
        server.wait_for_health(503)
        for pid in (server.pid, server.engine_pid()):  # the workers of the first engine, too, have the limits of others
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
        pids = processes(server)
        os.kill(server.pid, signal.SIGKILL)
        wait_for_end(pids)
        assert "is ready" not in server.log.read_text()


def test_a_server_that_is_stopped_while_its_engine_loads_tells_of_no_models(tiny: list[str], tmp_path: Path) -> None:
    """There are none yet: nothing is saved, nothing is lost, and the engine is not blamed for its end."""
    with serving(tmp_path, *tiny) as server:
        server.wait_for_log("the engine starts")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 0
        told = server.log.read_text()
        assert told.count("the server stops; its engine is not ready, and has no models to save") == 1
        assert not any(word in told for word in ("WARNING", "ERROR", "lost", "killed"))
