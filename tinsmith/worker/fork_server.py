"""A process that has imported a worker's libraries, and forks a worker whenever an engine asks for one.

`python -m tinsmith.worker.fork_server DATA_DIR`. An engine starts it, and keeps it with a socket that is its standard
input. It outlives engine and server, so that those that take their place need not wait for imports, and ends when none
has come for a minute. Workers that it has forked end when their engine is gone (`protocol/forking.py`).

It computes nothing and has no thread of its own: libraries that start threads or touch a GPU do so in the workers.
"""

import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import Start, end_with_parent, leave_signals_to_server
from tinsmith.protocol.forking import READY, Request, accept, digest_of_libraries, listen, send_exit_code, send_worker
from tinsmith.worker.__main__ import import_libraries, work

log = logging.getLogger(__name__)

ABANDONED_S = 60.0
"""Seconds without any engine after which it ends."""


class ForkServer:
    """Forks workers on request, and tells how they end."""

    def __init__(self, listener: socket.socket, keeper: socket.socket, libraries: str) -> None:
        """Wait at `listener` for requests of those that would import the same `libraries`.

        `keeper` is the connection of the engine that has started this process.
        """
        self._listener = listener
        self._libraries = libraries
        self._selector = selectors.DefaultSelector()
        for each in (listener, keeper):
            self._selector.register(each, selectors.EVENT_READ)
        self._keepers = {keeper}
        self._workers = dict[int, tuple[int, socket.socket]]()
        """Process id and connection of each worker, by the file descriptor of its process."""
        self._pidfds = dict[socket.socket, int]()
        self.were_ready = False
        """Whether workers with these libraries have been ready."""

    def run(self) -> Request | None:
        """Serve until nobody needs it any more. Returns a request in the process that is to become its worker."""
        while True:
            waits = bool(self._keepers or self._workers)
            ready = self._selector.select(None if waits else ABANDONED_S)
            if not ready:
                return None
            for key, _ in ready:
                source = key.fileobj
                if source is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fd in self._workers:
                    self._has_ended(key.fd)
                elif source in self._pidfds:
                    self._abandon(source)
                elif source in self._keepers and not self._keep(source):
                    return None

    def _accept(self) -> Request | None:
        """Take a request. Returns it in a process that was forked for it."""
        asked = accept(self._listener)
        if asked is None:
            return None
        connection, request, files = asked
        if request.libraries != self._libraries:
            connection.close()
        elif not request.start:
            _write_to(files)  # the output of the engine before may be read no more, or its end be waited for
            self._keepers.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
        elif self._fork(connection):
            _write_to(files)
            for file in files:
                os.close(file)
            return request
        for file in files:
            os.close(file)
        return None

    def _fork(self, connection: socket.socket) -> bool:
        """Fork; returns True in the new process, which keeps nothing of this one but its connection."""
        server = os.getpid()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's threads, which it stops for a fork
                pid = os.fork()
        except OSError:  # there are too many processes, or too little memory: other workers go on
            log.exception("no worker can be forked")
            connection.close()
            return False
        if pid == 0:
            end_with_parent()
            if os.getppid() != server:  # it had ended before
                os._exit(1)
            for each in [self._listener, *self._keepers, *self._pidfds]:
                each.close()
            for pidfd in self._workers:
                os.close(pidfd)
            self._selector.close()
            if connection.fileno() == 0:
                connection = connection.dup()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            threading.Thread(target=_end_with_engine, args=(connection,), name="engine", daemon=True).start()
            return True
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd], self._pidfds[connection] = (pid, connection), pidfd
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ)
        send_worker(connection, pid, pidfd)
        return False

    def _has_ended(self, pidfd: int) -> None:
        """Tell the engine that asked for a worker how it has ended."""
        pid, connection = self._workers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if self._pidfds.pop(connection, None) is not None:
            self._selector.unregister(connection)
        send_exit_code(connection, os.waitstatus_to_exitcode(status))
        connection.close()

    def _abandon(self, connection: socket.socket) -> None:
        """Kill the worker of an engine that has closed its connection, or is gone; nothing else is said there."""
        pidfd = self._pidfds.pop(connection)
        self._selector.unregister(connection)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _keep(self, keeper: socket.socket) -> bool:
        """Hear what an engine says, or that it is gone, which others may follow; False if it said END."""
        said = b""
        with suppress(OSError):
            said = keeper.recv(1)
        if said == READY:
            self.were_ready = True
            return True
        self._keepers.remove(keeper)
        self._selector.unregister(keeper)
        keeper.close()
        if not self._keepers:
            with Path(os.devnull).open("wb") as nobody:  # it keeps nobody waiting for the end of its engine's output
                _write_to([nobody.fileno()] * 2)
        return not said


def _write_to(files: list[int]) -> None:
    """Let these open files be the standard output and error."""
    for number, file in enumerate(files, 1):
        os.dup2(file, number)


def _end_with_engine(connection: socket.socket) -> None:
    """End this worker when its engine closes the connection, even if the fork server is stopped, and kills nobody."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    os._exit(1)


def main() -> int:
    """Fork workers until none is needed, or be one."""
    leave_signals_to_server()
    start_logging("worker")
    libraries = digest_of_libraries(os.environ)  # before they are imported: they may change meanwhile
    import_libraries()
    from tinsmith.kernels.compiled import digest_of_sources
    from tinsmith.worker.bases import versions

    digest_of_sources(), versions()  # which its workers need, and take half a second
    server = ForkServer(listen(Path(sys.argv[1])), socket.socket(fileno=0), libraries)
    request = server.run()
    if request is None:
        return 0
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    start = Start.from_bytes(request.start.encode())
    return work(replace(start, again=start.again or server.were_ready), os.getppid())


if __name__ == "__main__":
    sys.exit(main())
