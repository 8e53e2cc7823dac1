"""`python -m tinsmith.engine ADDRESS SERVER_PID`: the engine process.

Started by the server, with the configuration as JSON on standard input.
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
from tinsmith.protocol.link import EngineLink
from tinsmith.protocol.serving import Bye

log = logging.getLogger(__name__)


def main() -> int:
    """Run an engine until its server stops it.

    Ctrl-C reaches the whole process group, and SIGTERM of a service manager all processes of the service: both are the server's to handle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which vLLM servers that are started would inherit
    start_logging("engine")
    link = EngineLink(sys.argv[1])
    heartbeat = Heartbeat(sys.argv[1])
    heartbeat.start()
    gc.disable()  # torch and transformers come to stay: looking for garbage among them takes a sixth of their import
    from tinsmith.engine.loop import Engine

    gc.freeze()  # nor does a later collection look through them
    gc.enable()
    try:
        config = from_tree(orjson.loads(sys.stdin.buffer.read()))
        start_logging("engine", config.log_level)
        engine = Engine(config, link, heartbeat)
    except ConfigError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    try:
        engine.run(int(sys.argv[2]))
    except DeviceLostError as error:
        log.critical("the engine ends: %s", error)
        link.send(Bye(str(error)))
        return 3
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
