"""`python -m tinsmith.worker SOCKET ENGINE_PID`: a worker process.

Started by the engine, with the configuration as JSON on standard input.
"""

import gc
import logging
import signal
import sys

import orjson

from tinsmith.config import from_tree
from tinsmith.errors import ConfigError, DeviceLostError
from tinsmith.logs import start_logging
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.serving import Bye

log = logging.getLogger(__name__)


def main() -> int:
    """Run a worker until its engine stops it.

    Ctrl-C reaches the whole process group, and SIGTERM of a service manager all processes of the service: both are the server's to handle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which vLLM servers that are started would inherit
    start_logging("worker")
    link = ChildLink(sys.argv[1])
    heartbeat = Heartbeat(sys.argv[1], parent_pid=int(sys.argv[2]))
    heartbeat.start()
    gc.disable()  # torch and transformers come to stay: looking for garbage among them takes a sixth of their import
    from tinsmith.worker.loop import Worker, load_bases

    gc.freeze()  # nor does a later collection look through them
    gc.enable()
    try:
        config = from_tree(orjson.loads(sys.stdin.buffer.read()))
        start_logging("worker", config.log_level)
        worker = Worker(config, load_bases(config), link, heartbeat)
    except ConfigError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    try:
        worker.run(int(sys.argv[2]))
    except DeviceLostError as error:
        log.critical("the worker ends: %s", error)
        link.send(Bye(str(error)))
        return 3
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
