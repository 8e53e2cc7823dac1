"""How long a start still takes, as the server says it."""

import json
import re
from pathlib import Path

import pytest

from tinsmith.protocol.serving import Starting
from tinsmith.server.start_progress import FILE, StartProgress

STEPS = [Starting("imports its libraries", ["loads a", "checks a"]), Starting("loads a", ["checks a"]), Starting("checks a", [])]


def test_a_first_start_counts_its_steps_and_keeps_how_long_they_took(tmp_path: Path) -> None:
    progress = StartProgress(tmp_path)
    progress.begin()
    told = [progress.text]
    for step in STEPS:
        progress.take(step)
        told.append(progress.text)
    starting = "the engine is starting"
    assert told[::2] == [starting, f"{starting}: it loads a (step 2 of 3)"]
    assert progress.left_s is None
    progress.finish()
    known = json.loads((tmp_path / FILE).read_text())
    assert list(known) == ["imports its libraries", "loads a", "checks a"]
    assert all(seconds >= 0 for seconds in known.values())


def test_a_later_start_says_the_seconds_that_its_steps_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    (tmp_path / FILE).write_text(json.dumps({"imports its libraries": 1000.0, "loads a": 3000.0, "checks a": 500.0}))
    progress = StartProgress(tmp_path)
    progress.begin()
    progress.take(STEPS[0])
    assert progress.left_s == 4500
    now += 100
    assert progress.left_s == 4400
    progress.take(STEPS[1])
    assert progress.left_s == 3500
    assert re.fullmatch(r"the engine is starting: it loads a \(step 2 of 3\); about 3500 s are left", progress.text)
    now += 3500  # it takes longer than the last time, and nobody knows how much
    assert progress.left_s == 500
    progress.take(Starting("loads b", []))
    assert progress.left_s is None


@pytest.mark.parametrize("content", ["{", "[]", '{"loads a": "long"}', '{"loads a": null}'])
def test_a_damaged_file_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    progress = StartProgress(tmp_path)
    progress.take(STEPS[1])
    assert progress.left_s is None


def test_a_full_disk_is_said_and_disturbs_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = StartProgress(tmp_path / "gone")
    progress.begin()
    progress.finish()
    assert "the next start cannot say how long it takes" in caplog.text
