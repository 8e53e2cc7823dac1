"""How long a start still takes, as the server says it."""

from pathlib import Path

import pytest

from tinsmith.protocol.serving import Starting
from tinsmith.server.engine_process import FILE, StartProgress

STEPS = [
    Starting("imports its libraries", ["loads a", "checks a"]),
    Starting("loads a", ["checks a"]),
    Starting("checks a", []),
]


def test_a_start_counts_its_steps_and_a_later_one_says_the_seconds_that_they_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    first, later = StartProgress(tmp_path), "the engine is starting: it loads a (step 2 of 3)"
    first.begin()
    for step, seconds in zip(STEPS, (1000, 3000, 500), strict=True):
        first.take(step)
        assert (first.left_s, step != STEPS[1] or first.text == later) == (None, True)
        now += seconds
    first.finish()
    progress = StartProgress(tmp_path)
    progress.begin()
    for step, passed, left in ((STEPS[0], 0, 4500), (STEPS[0], 100, 4400), (STEPS[1], 0, 3500), (STEPS[1], 3500, 500)):
        progress.take(step)
        now += passed
        assert progress.left_s == left
        assert progress.text.endswith(f"; about {left} s are left")
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
