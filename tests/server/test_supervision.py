"""A real server with a real engine: ready, killed, restarted, stopped.

Invariant: A dead engine's work ends in clear errors; Ctrl-C ends all processes.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.running import START_S, Server, limited_program, serving
from tinsmith.store.store import Store


@pytest.fixture
def tiny(family_dir: Callable[[str], Path]) -> list[str]:
    """Options that serve one model."""
    return ["--base-model", f"tiny={family_dir('qwen3')}"]


def new_model(client: httpx.Client) -> tuple[str, str]:
    """Ids of a new session and a model in it, whose create_model is done."""
    session_id = client.post("create_session", json={}).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    future = client.post("create_model", json=body).json()
    done = client.post("retrieve_future", json={"request_id": future["request_id"]}).json()
    assert done == {"model_id": f"{session_id}:train:0", "type": "create_model"}
    return session_id, done["model_id"]


def is_running(pid: int) -> bool:
    """A process that has ended may still be listed until somebody collects it: then it has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + START_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def endless_sample(sampler: str) -> dict[str, object]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    params = {"max_tokens": 20_000, "stop": []}
    return {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": params}


def test_an_engine_that_dies_is_restarted_and_its_work_ends_in_clear_errors(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny) as server, server.client() as client, ThreadPoolExecutor() as threads:
        assert client.get("healthz").status_code == 503
        server.wait_for_health()
        session_id, model_id = new_model(client)
        save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
        saved = client.post("save_weights_for_sampler", json=save).json()
        snapshot = client.post("retrieve_future", json={"request_id": saved["request_id"]}).json()["sampling_session_id"]
        body = {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": "tiny"}
        base = client.post("create_sampling_session", json=body).json()["sampling_session_id"]
        polls = []
        for sampler in (snapshot, base):
            started = client.post("asample", json=endless_sample(sampler)).json()
            polls.append(threads.submit(client.post, "retrieve_future", json={"request_id": started["request_id"]}))
        # seq_id 3 waits in the engine for seq_id 2, which never comes.
        held = client.post("optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": {}}).json()
        polls.append(threads.submit(client.post, "retrieve_future", json={"request_id": held["request_id"]}))
        time.sleep(0.2)
        assert not any(poll.done() for poll in polls)

        worker = server.worker_pid()
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for_end(worker)  # whatever it computes: its device is needed by the next
        assert "signal 9" in server.wait_for_health(503).json()["detail"]
        of_snapshot, of_base, of_step = (poll.result(timeout=START_S) for poll in polls)
        assert (of_snapshot.status_code, of_base.status_code) == (404, 410)
        assert "the engine process ended unexpectedly (signal 9)" in of_snapshot.json()["detail"]
        ended, no_checkpoint = "the engine process ended unexpectedly (signal 9)", "it has no checkpoint to go on from"
        assert of_step.json() == {
            "error": f"{ended}; {no_checkpoint}: create a new model, and call save_state from time to time",
            "category": "server",
        }

        server.wait_for_health()
        later = client.post("optim_step", json={"model_id": model_id, "seq_id": 4, "adam_params": {}}).json()
        lost = client.post("retrieve_future", json={"request_id": later["request_id"]}).json()
        assert lost["category"] == "server"
        assert "was lost when its worker or the engine stopped" in lost["error"]
        assert client.post("asample", json=endless_sample(snapshot)).status_code == 404
        assert client.post("asample", json=endless_sample(base)).status_code == 200
        new_model(client)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=START_S) == 0


def test_ctrl_c_releases_polls_and_ends_all_processes(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny) as server, server.client() as client, ThreadPoolExecutor() as threads:
        server.wait_for_health()
        _, model_id = new_model(client)
        held = client.post("optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}}).json()
        poll = threads.submit(client.post, "retrieve_future", json={"request_id": held["request_id"]})
        time.sleep(0.2)
        pids = server.engine_pid(), server.worker_pid()
        server.process.send_signal(signal.SIGINT)
        assert poll.result(timeout=START_S).status_code == 408
        assert server.process.wait(timeout=START_S) == 0
        assert not any(is_running(pid) for pid in pids)


def test_a_second_ctrl_c_ends_at_once(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny, "--shutdown-s", "3600") as server:
        server.wait_for_health()
        engine_pid, worker_pid = server.engine_pid(), server.worker_pid()
        os.kill(engine_pid, signal.SIGSTOP)  # it never finishes what it is at
        server.process.send_signal(signal.SIGINT)
        server.wait_for_log("a second Ctrl-C ends it at once")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 128 + signal.SIGINT
        assert not is_running(engine_pid)
        wait_for_end(worker_pid)  # it notices that its engine is gone


def test_an_engine_whose_server_dies_while_it_loads_ends_too_and_so_does_its_worker(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny) as server:
        server.wait_for_health(503)
        engine = server.engine_pid()
        deadline = time.monotonic() + START_S
        while not psutil.Process(engine).children():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker = server.worker_pid()
        server.process.kill()
        for pid in (engine, worker):
            wait_for_end(pid)
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


def test_a_low_limit_of_open_files_is_raised_and_a_data_dir_has_one_server(tiny: list[str], tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(tmp_path, *tiny, program=limited_program(resource.RLIMIT_NOFILE, 256)) as server:
        server.wait_for_health(503)
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
        with (tmp_path / "second.log").open("w") as log:
            second = Server(log, tmp_path / "data", tiny)
            assert second.process.wait(timeout=START_S) == 2
        assert "is used by another server" in second.log.read_text()


def test_an_engine_that_cannot_start_ends_the_server(tiny: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *tiny, "--max-context", "1000000") as server:
        assert server.process.wait(timeout=START_S) == 2
        assert "before it could take work" in server.log.read_text()


def test_a_damaged_database_ends_the_server_in_one_line(tiny: list[str], tmp_path: Path) -> None:
    Store.open(tmp_path / "data").close()
    content = (tmp_path / "data" / "tinsmith.db").read_bytes()
    (tmp_path / "data" / "tinsmith.db").write_bytes(content[:5000] + os.urandom(len(content) - 5000))
    with serving(tmp_path, *tiny) as server:
        assert server.process.wait(timeout=START_S) == 2
        (line,) = [line for line in server.log.read_text().splitlines() if line.startswith("tinsmith: ")]
        assert line.startswith(f"tinsmith: {tmp_path}/data/tinsmith.db is damaged: ")
        assert "or move tinsmith.db* away and run `tinsmith recover" in line
        assert "Traceback" not in server.log.read_text()
