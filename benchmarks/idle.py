"""CPU time of an idle server's processes over 20 seconds, with one model loaded, in percent of a core.

Run it with: taskset -c 0,1 python -m benchmarks.idle
"""

import os
import tempfile
import time
from pathlib import Path

from benchmarks.servers import BASE_MODEL, training_client
from benchmarks.timing import report
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model

SETTLE_S, WATCH_S = 3.0, 20.0


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, all its threads together."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model("qwen3", directory / "model")
        with serving(directory, "--base-model", f"{BASE_MODEL}={directory / 'model'}") as server:
            server.wait_for_health()
            with training_client(server.url):
                pass  # the session is finished and its client gone: no heartbeat reaches the server while we watch
            time.sleep(SETTLE_S)
            pids = {"server": server.process.pid, "engine": server.engine_pid(), "worker": server.worker_pid()}
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            time.sleep(WATCH_S)
            shares = {name: 100 * (cpu_seconds(pid) - before[name]) / WATCH_S for name, pid in pids.items()}
    report("idle_percent_of_a_core", sum(shares.values()), "less than 1", **shares)


if __name__ == "__main__":
    main()
