"""The log: one format for all lines, of our processes and of the libraries that they use."""

import logging

LEVELS = ("debug", "info", "warning", "error")
"""The values of `--log-level`, from most lines to fewest."""


def start_logging(process: str, level: str = "info") -> None:
    """Log to standard error: our own lines from `level` on, and warnings and errors of libraries. A second call only changes the level."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s {process}: %(message)s")
    logging.getLogger("tinsmith").setLevel(level.upper())
