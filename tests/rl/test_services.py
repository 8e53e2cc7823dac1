"""Weights & Biases and trackio, where they are installed: what a run logs arrives in their own files, without a network."""

import sqlite3
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


def test_wandb_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("wandb")
    log_a_run("wandb", tmp_path / "first")
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for number in (b"0.125", b"0.375", b"0.625", b"0.875"):
        assert number in written


def test_trackio_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    log_a_run("trackio", tmp_path / "first")
    with sqlite3.connect(tmp_path / "tinsmith-rl.db") as database:
        rows = database.execute("select run_name, step, cast(metrics as text) from metrics order by step").fetchall()
    expected = ['{"eval/reward":0.125}', '{"reward":0.375}', '{"reward":0.625,"eval/reward":0.875}']
    assert rows == [("first", step, metrics) for step, metrics in enumerate(expected)]
