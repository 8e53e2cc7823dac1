"""One format for all log lines, of our processes and of libraries: text, or JSON objects with ids.

Messages quote clients: nothing of theirs begins a line, moves a terminal's cursor, or makes a line endless.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

from tinsmith.errors import printable, shortened

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
"""From most lines to fewest."""

_TRACEBACK_CHARACTERS = 20_000


FORMATS = ("text", "json")


def start_logging(process: str, level: str = "info", form: str = "text") -> None:
    """Log to standard error our lines from `level` on, and warnings of libraries, in one of `FORMATS`.

    A second call changes level and format, also those of libraries that were imported meanwhile. As JSON go warnings
    and uncaught exceptions as well.
    """
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(level=logging.WARNING, handlers=[_OwnHandler()])
    text = f"%(asctime)s %(levelname)s {process}: %(message)s"
    for handler in root.handlers:
        if isinstance(handler, _OwnHandler):
            handler.setFormatter(_JsonLine(process) if form == "json" else _OneLine(text))
    logging.getLogger("tinsmith").setLevel(level.upper())
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda of: _log_uncaught(of.exc_type, of.exc_value, of.exc_traceback)
        for library in list(root.manager.loggerDict.values()):  # another thread may import one just now
            _have_no_own_format(library)


def _log_uncaught(_kind: type[BaseException], error: BaseException | None, _traceback: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=error)


def _have_no_own_format(library: logging.Logger | logging.PlaceHolder) -> None:
    """Let lines that a library would write itself go to our handler."""
    if isinstance(library, logging.Logger) and any(type(each) is logging.StreamHandler for each in library.handlers):
        library.handlers = [each for each in library.handlers if type(each) is not logging.StreamHandler]
        library.propagate = True


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The one whose format is ours to choose: tests and libraries may have others."""


class _OneLine(logging.Formatter):
    """One line of limited length. Those of a traceback follow it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        record.message = printable(shortened(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        lines = shortened(super().formatException(ei), _TRACEBACK_CHARACTERS).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {printable(line)}" for line in lines)


class _JsonLine(_OneLine):
    """One JSON object of limited length: time, level, process, logger, message, and the ids that the line is about.

    Of `request`, `model` and `session`, a call names the narrowest (`extra={"request": ...}`), and the others follow;
    `tenant` it names where it is known.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": printable(shortened(record.getMessage())),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | _ids(record))


def _ids(record: logging.LogRecord) -> dict[str, str]:
    """Return the ids of a record: SESSION:train:N/SEQ is of model SESSION:train:N, of that session."""
    named: dict[str, object] = vars(record)
    known = ("request", "model", "session", "tenant")
    ids: dict[str, str] = {name: str(named[name]) for name in known if name in named}
    owner = ids.get("request", "").rpartition("/")[0] or ids.get("model", "")
    if ":train:" in owner:
        ids["model"] = owner
    if owner:
        ids["session"] = owner.partition(":")[0]
    return ids
