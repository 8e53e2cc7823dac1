"""`python -m tinsmith.engine ADDRESS SERVER_PID`: the engine process.

Started by the server, with the configuration as JSON on standard input.
"""

import gc
import logging
import signal
import sys

import orjson

from tinsmith.config import from_tree
from tinsmith.engine.link import EngineLink
from tinsmith.errors import ConfigError


def main() -> int:
    """Run an engine until its server stops it. Ctrl-C reaches the whole process group and is the server's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    link = EngineLink(sys.argv[1])
    gc.disable()  # torch and transformers come to stay: looking for garbage among them takes a sixth of their import
    from tinsmith.engine.loop import Engine

    gc.freeze()  # nor does a later collection look through them
    gc.enable()
    try:
        engine = Engine(from_tree(orjson.loads(sys.stdin.buffer.read())), link)
    except ConfigError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    engine.run(int(sys.argv[2]))
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
