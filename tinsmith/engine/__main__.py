"""`python -m tinsmith.engine SERVER_PID`: the engine process of this server.

It imports its libraries in a thread, and waits until standard input tells it how to start (`EngineStart`): then workers
are started at once, which load models while the rest is imported.
"""

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from importlib import import_module

from tinsmith.config import Config
from tinsmith.engine.worker_group import WorkerGroup
from tinsmith.errors import ConfigError, EngineUnavailableError
from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import EngineStart, end_with_parent, leave_signals_to_server
from tinsmith.protocol.devices import worker_count
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.reports import Reports

log = logging.getLogger(__name__)


def main() -> int:
    """Run an engine until its server stops it."""
    leave_signals_to_server()
    end_with_parent()
    start_logging("engine")
    server_pid = int(sys.argv[1])
    imports = threading.Thread(target=import_module, args=("tinsmith.engine.loop",), name="imports")
    imports.start()
    told = sys.stdin.buffer.read()
    if not told:  # the server has ended
        os._exit(0)  # in the middle of an import
    start = EngineStart.from_bytes(told)
    config = start.config
    link = ChildLink(start.address)
    heartbeat = Heartbeat(start.address, server_pid)
    heartbeat.start()
    try:
        start_logging("engine", config.log_level, config.log_format)
        workers = workers_of(config, link)
        signal.signal(signal.SIGCHLD, lambda *_: link.wake())  # the end of a worker is looked at when it comes
        workers.start_if_due()
        imports.join()
        from tinsmith.engine.loop import Engine

        start_logging("engine", config.log_level, config.log_format)  # for the libraries too, which are there now
        workers.records.open()
        engine = Engine(config, link, heartbeat, workers)
        engine.store.write_for(start.number)
        Reports(start.address, engine.status.take).start()
        engine.run(server_pid)
    except ConfigError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    except EngineUnavailableError as error:
        log.critical("the engine ends: %s", error)
        return 4
    finally:
        imports.join()  # an interpreter that ends lets imports fail
        link.close()
    return 0


def workers_of(config: Config, link: ChildLink) -> WorkerGroup:
    """Return the workers, of which none runs yet. Raises ConfigError if they cannot get what they need."""
    if not config.distributed.ray_address:
        return WorkerGroup(config, link, worker_count(config))
    # A thread that still waits for an actor when the engine leaves Ray would start a Ray of its own.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    from tinsmith.engine.ray_workers import RayActors  # which takes a second, and may not be installed

    count = worker_count(config)
    actors = RayActors(config, link.wake)
    config = replace(config, models=replace(config.models, device=actors.device))
    return WorkerGroup(config, link, count, launcher=actors)


if __name__ == "__main__":
    sys.exit(main())
