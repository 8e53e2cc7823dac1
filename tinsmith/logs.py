"""One format for all log lines, of our processes and of libraries.

Messages quote clients: nothing of theirs begins a line, moves a terminal's cursor, or makes a line endless.
"""

import logging

from tinsmith.errors import printable, shortened

LEVELS = ("debug", "info", "warning", "error")
"""From most lines to fewest."""

_TRACEBACK_CHARACTERS = 20_000


def start_logging(process: str, level: str = "info") -> None:
    """Log to standard error our lines from `level` on, and warnings of libraries.

    A second call only changes the level.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("tinsmith").setLevel(level.upper())


class _OneLine(logging.Formatter):
    """One line of limited length. Those of a traceback follow it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        record.message = printable(shortened(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        lines = shortened(super().formatException(ei), _TRACEBACK_CHARACTERS).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {printable(line)}" for line in lines)
