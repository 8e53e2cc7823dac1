"""A worker process, one of COUNT: `python -m tinsmith.worker ADDRESS PARENT_PID RANK COUNT MEETING`.

Started by the engine, or by an actor of Ray for it, with the configuration as JSON on standard input
(`protocol/child_process.py`). RANK, COUNT and MEETING are its place (`protocol/place.py`).
"""

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, cast

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError, DeviceLostError, EngineUnavailableError, WorkersLostError
from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import leave_signals_to_server, read_start
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.place import Place
from tinsmith.protocol.questions import Questions
from tinsmith.protocol.reports import Reports
from tinsmith.protocol.serving import Bye, Starting

log = logging.getLogger(__name__)


def main() -> int:
    """Run a worker until its engine stops it."""
    leave_signals_to_server()
    place = Place(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    name = "worker" if place.count == 1 else f"worker {place.rank}"
    start_logging(name)
    config, keys = read_start(sys.stdin.buffer)
    start_logging(name, config.log_level, config.log_format)
    link = ChildLink(sys.argv[1], keys)
    heartbeat = Heartbeat(sys.argv[1], int(sys.argv[2]), keys)
    heartbeat.start()
    steps = Steps(config, link.send)
    steps.begin()
    gc.disable()  # torch and transformers come to stay: looking for garbage among them takes a sixth of their import
    import torch

    if not config.only_compares:
        threading.Thread(target=_wake, args=(torch, config.models.device), daemon=True).start()
    # Transformers imports them where they are installed, for what we do not use: a second or two
    with _absent("scipy", "sklearn"):
        from tinsmith.training.parallel.process_group import ProcessGroup
        from tinsmith.worker.bases import load_bases, load_compared, require_same
        from tinsmith.worker.device_lock import lock_devices
        from tinsmith.worker.loop import Worker
        from tinsmith.worker.records import AskedRecords

    start_logging(name, config.log_level, config.log_format)  # for the libraries too, which are there now
    gc.freeze()  # nor does a later collection look through them
    gc.enable()
    try:
        lock_devices(config)  # nobody closes them: the process holds them to its end
        bases = load_bases(config, steps.begin, measures=place.rank == 0)
        steps.begin()
        compared = load_compared(config, bases)
        questions = Questions(sys.argv[1], keys)
        device = next(iter(bases.values())).device
        group = ProcessGroup(place, device, questions.ask, heartbeat.exchanges) if place.count > 1 else None
        if group is not None and place.host:
            require_same(group, bases)  # over the hosts' memory: other versions may not understand each other's GPUs
        if group is not None:
            group.connect()
        records = AskedRecords(questions.ask)
        worker = Worker(config, bases, link, heartbeat, records, group, place, compared)
        Reports(sys.argv[1], worker.status.make, keys).start()
        worker.run(int(sys.argv[2]))
    except ConfigError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        return 2
    except DeviceLostError as error:
        log.critical("the worker ends: %s", error)
        link.send(Bye(str(error), isinstance(error, WorkersLostError)))
        return 3
    except EngineUnavailableError as error:
        log.critical("the worker ends: %s", error)
        return 4
    finally:
        link.close()
    return 0


class Steps:
    """The steps of the start, told to the engine as they begin."""

    def __init__(self, config: Config, send: Callable[[Starting], None]) -> None:
        names = list(base_model_sources(config))
        self._to_come = [
            "imports its libraries",
            *(f"loads {name}" for name in names),
            *(f"checks {name}" for name in names),
            "makes room for training and sampling",
        ]
        self._send = send

    def begin(self) -> None:
        """The next one begins."""
        step, *self._to_come = self._to_come
        self._send(Starting(step, list(self._to_come)))


@contextmanager
def _absent(*packages: str) -> Iterator[None]:
    """Let imports in the body find that packages are not installed."""
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent, cast("ModuleType", None)))  # Python's own way to say so
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


def _wake(torch: Any, device: str) -> None:
    """Let a GPU get ready while this process imports libraries; loading a base model tells what is wrong with it."""
    with suppress(RuntimeError, AssertionError):
        if device != "cpu" and torch.cuda.is_available():
            torch.zeros(1, device="cuda" if device == "auto" else device)


if __name__ == "__main__":
    sys.exit(main())
