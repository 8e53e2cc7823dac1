"""Weights & Biases and trackio, where they are installed: what a run logs arrives in their own files, without a network."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tinsmith.rl.trackers import make_trackers

SETTINGS = {"training": {"steps": 2}}
LINES = [(-1, {"eval/reward": 0.125}), (0, {"reward": 0.375}), (1, {"reward": 0.625, "eval/reward": 0.875})]


def log_a_run(service: str, directory: Path) -> None:
    directory.mkdir()
    trackers = make_trackers([service], directory, 0, SETTINGS, Console(quiet=True))
    for tracker in trackers:
        for step, metrics in LINES:
            tracker.log(step, metrics)
        tracker.close()


def eventually(happened: Callable[[], bool]) -> bool:
    """Whether it happens in time: what is finished may still be on its way to the disk."""
    deadline = time.monotonic() + 600
    while not (done := happened()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def test_wandb_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("wandb")
    log_a_run("wandb", tmp_path / "first")
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert eventually(lambda: all(number in record.read_bytes() for number in (b"0.125", b"0.375", b"0.625", b"0.875")))


def test_trackio_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    log_a_run("trackio", tmp_path / "first")
    expected = ['{"eval/reward":0.125}', '{"reward":0.375}', '{"reward":0.625,"eval/reward":0.875}']
    rows = [("first", step, metrics) for step, metrics in enumerate(expected)]
    with sqlite3.connect(tmp_path / "tinsmith-rl.db") as database:
        query = "select run_name, step, cast(metrics as text) from metrics order by step"
        assert eventually(lambda: database.execute(query).fetchall() == rows)
