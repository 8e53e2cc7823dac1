"""`tinsmith trace`: asks a server what its processes did in the last minutes, and writes that for ui.perfetto.dev."""

from pathlib import Path

import orjson

from tinsmith.commands.status import fetch
from tinsmith.errors import ConfigError, translated


def write_trace(url: str, key: str, minutes: float, file: Path) -> str:
    """Write the trace to a file; returns what to do with it. Raises ConfigError."""
    trace = fetch(url, f"trace?seconds={minutes * 60:g}", key, "traceEvents")
    with translated(OSError, ConfigError, lambda error: f"{file} cannot be written: {error}"):
        file.write_bytes(orjson.dumps(trace))
    return f"{file}: open it at https://ui.perfetto.dev"
