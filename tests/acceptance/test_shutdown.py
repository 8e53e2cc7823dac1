"""What survives what: models when the server is stopped, their machine is, or their client ends its session.

Invariant: Ctrl-C saves live models and says where; finished, unloaded and lost models are told apart, and errors name
the newest checkpoint. Also: `tests/store/test_endings.py`, `tests/engine/test_database_trouble.py`.
"""

import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import tinker

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, learn, scores, text_input, train
from tests.running import START_S
from tinsmith.store.sqlite import FILE_NAME

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING|ERROR) (server|engine|worker): \S")
"""One format, whoever writes."""

ITEM = datum(text_input(5, 12), 5)


def statuses(http: httpx.Client) -> dict[str, tuple[str, bool]]:
    """Status of each run, and whether the SDK's command line calls it failed."""
    runs = http.get("training_runs").json()["training_runs"]
    return {run["training_run_id"]: (run["status"], run["corrupted"]) for run in runs}


def test_the_end_of_a_terminal_saves_live_models_and_each_model_is_called_what_became_of_it(
    text_only: list[str], tmp_path: Path
) -> None:
    with ready(tmp_path, *text_only) as first:
        port, service = first.url.rpartition(":")[2], connect(first)
        lost, unsaved = train(service, "text"), train(service, "text")
        saved = [lost.save_state(name).result().path for name in ("older", "newest")][-1]
        with first.client() as http:
            os.kill(first.pid, signal.SIGKILL)
            first.process.wait(timeout=START_S)
            with closing(sqlite3.connect(tmp_path / "data" / FILE_NAME)) as database:
                database.execute("UPDATE engine_starts SET place = 'a machine that had no power'")
                database.commit()
            first.start_again()
            first.wait_for_health()
            gone = "was lost when its worker or the engine stopped; "
            with pytest.raises(
                tinker.RequestFailedError,
                match=gone + f"go on from its newest checkpoint, {saved}, with create_training",
            ):
                lost.optim_step(RAW_STEP).result()
            with pytest.raises(
                tinker.RequestFailedError, match=gone + "it has no checkpoint to go on from: .* call save_state"
            ):
                unsaved.optim_step(RAW_STEP).result()
            with connect(first) as done:
                finished = train(done, "text")
            live = [learn(train(service, "text", seed=seed), [ITEM]) for seed in (1, 2)]
            before = [scores(client, [ITEM])[0].tolist() for client in live]
            service.create_sampling_client(base_model="text").result().compute_logprobs(text_input(0, 5)).result()
            expected = {
                lost.model_id: ("lost", True),
                unsaved.model_id: ("lost", True),
                finished.model_id: ("finished", False),
            }
            assert statuses(http) == expected | {client.model_id: ("ready", False) for client in live}
        for pid in (first.worker_pid(), first.engine_pid()):
            os.kill(pid, signal.SIGINT)  # from a terminal, Ctrl-C reaches all processes
            os.kill(pid, signal.SIGTERM)  # and a service manager sends it to all
            os.kill(pid, signal.SIGHUP)  # as does a terminal that is closed, an ssh connection that ends
        for _ in range(3):  # a shell that ends sends one, and the system another
            first.process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert first.process.wait(timeout=START_S) == 0
        log = first.log.read_text()
        assert [line for line in log.splitlines() if not LOG_LINE.match(line)] == []
        assert re.search(
            rf"model={live[0].model_id} seq_id=1 kind=forward_backward tokens=12 .* seconds=\S+ queued=", log
        )
        assert "server: the engine starts: it imports its libraries and loads text=" in log
        assert "worker: loading text from " in log
        assert sum(map(int, re.findall(r"worker: samples: (\d+) finished", log))) == 1
        assert " sample=" not in log  # one line for each is for debugging
        kept = [f"tinker://{client.model_id}/weights/session-end" for client in live]
        told = re.findall(
            r"model \S+ is kept as (\S+) for 7 days; go on with create_training_client_from_state_with_opt", log
        )
        assert sorted(told) == sorted(kept)
    with ready(tmp_path, *text_only, "--port", port) as second:
        with second.client() as http:
            assert statuses(http) == expected | {client.model_id: ("unloaded", False) for client in live}
        stopped = f"is unloaded: the server was stopped; go on from its newest checkpoint, {kept[0]}"
        with pytest.raises(tinker.RequestFailedError, match=stopped):
            live[0].optim_step(RAW_STEP).result()
        resumed = [service.create_training_client_from_state_with_optimizer(path).result() for path in kept]
        assert [scores(client, [ITEM])[0].tolist() for client in resumed] == before
        service.close("success")
