"""A worker process: `python -m tinsmith.worker PARENT_PID`.

Started by the engine, or by an actor of Ray for it, and told on standard input what it works for
(`protocol/child_process.py`). The workers that follow are forked by `fork_server.py`, which has imported its libraries.
"""

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import cast

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError, DeviceLostError, EngineUnavailableError, WorkersLostError
from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import Start, end_with_parent, leave_signals_to_server
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.questions import Questions
from tinsmith.protocol.reports import Reports
from tinsmith.protocol.serving import IMPORTS, Bye, Starting

log = logging.getLogger(__name__)


def main() -> int:
    """Run a worker until its engine stops it."""
    leave_signals_to_server()
    end_with_parent()
    start_logging("worker")
    told = sys.stdin.buffer.read()
    if not told:  # its parent has ended before it said anything
        return 0
    return work(Start.from_bytes(told), int(sys.argv[1]))


def work(start: Start, parent_pid: int) -> int:
    """Be the worker that an engine has asked for, until it stops this; returns the exit code."""
    config, place, address, keys = start.config, start.place, start.address, start.keys
    name = "worker" if place.count == 1 else f"worker {place.rank}"
    Path("/proc/self/comm").write_text(name)  # for `ps`
    start_logging(name, config.log_level, config.log_format)
    link = ChildLink(address, keys)
    heartbeat = Heartbeat(address, parent_pid, keys)
    heartbeat.start()
    steps = Steps(config, link.send)
    steps.begin()
    if not config.only_compares:
        threading.Thread(target=_wake, args=(config.models.device,), daemon=True).start()
    import_libraries()
    from tinsmith.training.parallel.process_group import ProcessGroup
    from tinsmith.worker.bases import load_bases, load_compared, require_same
    from tinsmith.worker.device_lock import lock_devices
    from tinsmith.worker.loop import Worker
    from tinsmith.worker.records import AskedRecords

    start_logging(name, config.log_level, config.log_format)  # for the libraries too, which are there now
    try:
        lock_devices(config)  # nobody closes them: the process holds them to its end
        bases = load_bases(config, steps.begin, measures=place.rank == 0, again=start.again)
        steps.begin()
        compared = load_compared(config, bases)
        questions = Questions(address, keys)
        device = next(iter(bases.values())).device
        group = ProcessGroup(place, device, questions.ask, heartbeat.exchanges) if place.count > 1 else None
        if group is not None and place.host:
            require_same(group, bases)  # over the hosts' memory: other versions may not understand each other's GPUs
        if group is not None:
            group.connect()
        records = AskedRecords(questions.ask)
        worker = Worker(config, bases, link, heartbeat, records, group, place, compared)
        Reports(address, worker.status.make, keys).start()
        worker.run(parent_pid)
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
            IMPORTS,
            *(f"loads {name}" for name in names),
            *(f"checks {name}" for name in names),
            "makes room for training and sampling",
        ]
        self._send = send

    def begin(self) -> None:
        """The next one begins."""
        step, *self._to_come = self._to_come
        self._send(Starting(step, list(self._to_come)))


def import_libraries() -> None:
    """Import all that a worker needs, if that has not happened yet."""
    gc.disable()  # torch and transformers come to stay: looking for garbage among them takes a sixth of their import
    # Transformers imports them where they are installed, for what we do not use: a second or two
    with _absent("scipy", "sklearn"):
        for module in ("training.parallel.process_group", "worker.bases", "worker.loop"):
            import_module(f"tinsmith.{module}")
    gc.freeze()  # nor does a later collection look through them
    gc.enable()


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


def _wake(device: str) -> None:
    """Let a GPU get ready while this process imports libraries; loading a base model tells what is wrong with it."""
    import torch

    with suppress(RuntimeError, AssertionError):
        if device != "cpu" and torch.cuda.is_available():
            torch.zeros(1, device="cuda" if device == "auto" else device)


if __name__ == "__main__":
    sys.exit(main())
