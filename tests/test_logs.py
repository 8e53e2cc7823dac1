"""What clients say cannot pass for lines of the log, nor for commands to the terminal that shows it.

Invariant: No text of a client begins a line of the log, and no reply holds a directory of the server.
Also: `tests/server/test_service.py`.
"""

import io
import json
import logging
import re
import subprocess
from datetime import UTC, datetime

import pytest

from tests.preloaded import REAL_PYTHON
from tinsmith.logs import start_logging

FORGED = "1.0\n2026-01-01 00:00:00,000 INFO server: all is well\r\x1b[2J\x85\u2028\u202e\x00end"
SHOWN = r"1.0\n2026-01-01 00:00:00,000 INFO server: all is well\r\x1b[2J\x85\u2028\u202e\x00end"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a process writes to standard error, whose logging begins now."""
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("tinsmith"), "level", logging.NOTSET)
    monkeypatch.setattr("sys.stderr", stream)
    start_logging("server")
    return stream


def test_a_message_is_one_line_whatever_it_quotes(written: io.StringIO) -> None:
    logging.getLogger("tinsmith.server").info("session %s begins (SDK %s)", "s", FORGED)
    (line,) = written.getvalue().splitlines()
    assert line.endswith(f" INFO server: session s begins (SDK {SHOWN})")


def test_a_long_message_loses_its_middle(written: io.StringIO) -> None:
    logging.getLogger("tinsmith.server").info("session s begins (SDK %s)", "x" * 120_000)
    assert re.search(r"x \.\.\. \(\d+ characters left out\) \.\.\. x", written.getvalue())
    assert len(written.getvalue()) < 2_200


def test_json_lines_name_request_model_and_session(written: io.StringIO) -> None:
    start_logging("engine", "info", "json")
    log = logging.getLogger("tinsmith.engine")
    log.info("session %s begins (SDK %s)", "s", FORGED, extra={"session": "s"})
    log.warning("failed", extra={"request": "s:train:2/7"})
    log.info("model %s is back", "s:train:2", extra={"model": "s:train:2"})
    log.info("a sample", extra={"request": "s:sample:1/4"})
    try:
        fail()
    except ValueError:
        log.exception("unexpected error")
    first, *ids, last = [json.loads(line) for line in written.getvalue().splitlines()]
    assert first.pop("time") <= datetime.now(UTC).isoformat()
    assert first == {
        "level": "info",
        "process": "engine",
        "logger": "tinsmith.engine",
        "message": rf"session s begins (SDK {SHOWN})",
        "session": "s",
    }
    named = [{name: line.get(name) for name in ("request", "model", "session")} for line in ids]
    assert named == [
        {"request": "s:train:2/7", "model": "s:train:2", "session": "s"},
        {"request": None, "model": "s:train:2", "session": "s"},
        {"request": "s:sample:1/4", "model": None, "session": "s"},
    ]
    assert (last["message"], "ValueError: 1.0" in last["traceback"]) == ("unexpected error", True)
    start_logging("engine")
    log.info("text again")
    assert written.getvalue().endswith(" INFO engine: text again\n")


def fail() -> None:
    raise ValueError(FORGED)


def test_a_library_may_be_imported_while_logging_starts(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(1000))
    monkeypatch.setattr("tinsmith.logs._have_no_own_format", lambda _: logging.getLogger(f"imported.{next(names)}"))
    start_logging("engine", "info", "json")
    assert next(names) > 0
    assert not written.getvalue()


BY_OTHERS = """
import logging, threading, warnings
from tinsmith.logs import start_logging
library = logging.getLogger("library")
library.propagate = False
library.addHandler(logging.StreamHandler())
start_logging("worker", "info", "json")
library.warning("of a library")
warnings.warn("of Python")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the end")
"""


def test_what_libraries_and_python_itself_write_is_json_too() -> None:
    ended = subprocess.run([REAL_PYTHON, "-P", "-c", BY_OTHERS], check=False, capture_output=True, text=True)
    told = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [(line["logger"], line["level"]) for line in told] == [
        ("library", "warning"),
        ("py.warnings", "warning"),
        ("tinsmith.logs", "critical"),
        ("tinsmith.logs", "critical"),
    ]
    assert "UserWarning: of Python" in told[1]["message"]
    assert ["ZeroDivisionError" in told[2]["traceback"], "ValueError: the end" in told[3]["traceback"]] == [True, True]
    assert ended.returncode == 1


def test_the_lines_of_a_traceback_are_no_lines_of_their_own(written: io.StringIO) -> None:
    try:
        fail()
    except ValueError:
        logging.getLogger("tinsmith.server").exception("unexpected error")
    first, *rest = written.getvalue().split("\n")[:-1]
    assert first.endswith("ERROR server: unexpected error")
    assert any("Traceback" in line for line in rest)
    assert "ValueError: 1.0" in "".join(rest)
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
