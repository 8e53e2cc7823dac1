"""The log: one format for the lines of the server, of the engine and of the libraries that they use."""

import logging
from typing import Literal

LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` takes, from most lines to fewest."""


def start_logging(process: Literal["server", "engine"], level: str = "info") -> None:
    """Write our lines from `level` on, and warnings and errors of libraries, to standard error. Called again, change the level only."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s {process}: %(message)s")
    logging.getLogger("tinsmith").setLevel(level.upper())
