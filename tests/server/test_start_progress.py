"""How long a start still takes, as the server says it."""

import json
import logging
import re
from pathlib import Path

import pytest

from tinsmith.protocol.serving import Starting
from tinsmith.server.start_progress import FILE, StartProgress

STEPS = [Starting("imports its libraries", ["loads a", "checks a"]), Starting("loads a", ["checks a"])]


def started(progress: StartProgress) -> None:
    progress.begin()
    for step in (*STEPS, Starting("checks a", [])):
        progress.take(step)
    progress.finish()


def test_a_first_start_counts_its_steps(tmp_path: Path) -> None:
    progress = StartProgress(tmp_path)
    assert progress.text == "the engine is starting"
    progress.begin()
    for step in STEPS:
        progress.take(step)
    assert progress.text == "the engine is starting: it loads a (step 2 of 3)"
    assert progress.left_s is None


def test_a_later_start_says_the_seconds_that_its_steps_took(tmp_path: Path) -> None:
    started(StartProgress(tmp_path))
    known = json.loads((tmp_path / FILE).read_text())
    assert list(known) == ["imports its libraries", "loads a", "checks a"]
    assert all(0 <= seconds < 60 for seconds in known.values())
    (tmp_path / FILE).write_text(json.dumps({"imports its libraries": 1000.0, "loads a": 3000.0, "checks a": 500.0}))
    progress = StartProgress(tmp_path)
    progress.begin()
    progress.take(STEPS[0])
    first = progress.left_s
    assert first is not None
    assert 4400 < first <= 4500
    progress.take(STEPS[1])
    left = progress.left_s
    assert left is not None
    assert 3400 < left <= 3500
    assert re.fullmatch(r"the engine is starting: it loads a \(step 2 of 3\); about 3[45]\d\d s are left", progress.text)
    (tmp_path / FILE).write_text(json.dumps(dict.fromkeys(known, 0.0)))
    slower = StartProgress(tmp_path)
    slower.take(STEPS[0])
    assert slower.left_s == 0.0  # it takes longer than the last time, and nobody knows how much
    slower.take(Starting("loads b", []))
    assert slower.left_s is None


@pytest.mark.parametrize("content", ["{", "[]", '{"loads a": "long"}', '{"loads a": null}'])
def test_a_damaged_file_says_nothing(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text(content)
    progress = StartProgress(tmp_path)
    progress.take(STEPS[1])
    assert progress.left_s is None
    assert (FILE in caplog.text) == (content == "{")


def test_a_full_disk_is_said_and_disturbs_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    started(StartProgress(tmp_path / "gone"))
    assert "the next start cannot say how long it takes" in caplog.text
