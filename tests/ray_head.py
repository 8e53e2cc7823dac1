"""A Ray of a test's own, on the loopback address alone.

`python -m tests.ray_head DIRECTORY CORES` keeps its files in DIRECTORY, whose path must be short, writes its address, and ends with its
input. Programs that connect need the token that is in the environment.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Ray reads these when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as on these systems, Ray then listens on the loopback address alone


@contextmanager
def ray_head(cores: int) -> Iterator[str]:
    """The address of a Ray with so many cores."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "tests.ray_head", directory, str(cores)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdout is not None
            yield head.stdout.readline().strip()
            head.communicate()


def main() -> None:
    """Run until the input ends."""
    import ray

    context: Any = ray.init(
        address="local",
        num_cpus=int(sys.argv[2]),
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        _temp_dir=sys.argv[1],
        _system_config={"enable_metrics_collection": False, "prestart_worker_first_driver": False},
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
