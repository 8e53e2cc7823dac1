"""The fork server: workers without imports, for the engine that started it and for those that come after.

Invariant: Workers end with their engine, also those that a fork server has forked, and none runs older code or other
libraries than its engine. Also: `tests/acceptance/test_kills.py`.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.preloaded import REAL_PYTHON, process_behind
from tinsmith.config import Config, ModelsConfig
from tinsmith.engine.launching import WORKER, ForkedProgram, Launcher, Surroundings, WorkerProgram
from tinsmith.models.tiny import write_tiny_model
from tinsmith.protocol import forking
from tinsmith.protocol.child_process import Start
from tinsmith.protocol.forking import END, Request, connect, digest_of_libraries, listen
from tinsmith.protocol.place import Place
from tinsmith.worker import fork_server
from tinsmith.worker.fork_server import ForkServer

LONG_S = 120.0
HERE = Surroundings(WORKER, {})


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """One that has a fork server, which is ready."""
    launcher = Launcher(tmp_path)
    launcher.stand_by(HERE, False)
    _wait(lambda: connect(tmp_path, Request("of another test")))
    yield launcher
    launcher.close()


def _wait(look: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _wait_for_output(capfd: pytest.CaptureFixture[str], text: str) -> None:
    _wait(lambda: text in capfd.readouterr().err)


def _start(home: Path, model: str = "empty") -> Start:
    """A worker for an engine that says nothing; without a model it ends."""
    (home / "empty").mkdir(exist_ok=True)
    (home / "empty" / "config.json").write_text("{}")
    config = Config(base_models=[f"tiny={home / model}"], data_dir=str(home), models=ModelsConfig(device="cpu"))
    return Start(f"ipc://{home}/engine", None, Place(), config, again=False)


def _serving(launcher: Launcher, home: Path) -> ForkedProgram:
    """A worker that has begun to serve a tiny model."""
    if not (home / "model").exists():
        write_tiny_model("qwen3", home / "model")
    return _forked(launcher.launch(HERE, _start(home, "model")))


def _forked(program: WorkerProgram) -> ForkedProgram:
    assert isinstance(program, ForkedProgram)
    assert program.pid is not None
    return program


def _parent_of(program: WorkerProgram) -> int:
    assert program.pid is not None
    return psutil.Process(program.pid).ppid()


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_is_forked_in_the_surroundings_of_its_engine_and_its_end_is_told(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = _forked(launcher.launch(HERE, _start(tmp_path)))
    assert program.wait(LONG_S) == 2
    assert "tinsmith: " in capfd.readouterr().err


def test_a_worker_that_is_killed_says_so_and_the_next_is_forked_again(launcher: Launcher, tmp_path: Path) -> None:
    first = _serving(launcher, tmp_path)
    server = _parent_of(first)
    assert first.poll() is None
    first.kill()
    assert first.wait(LONG_S) == -signal.SIGKILL
    assert _parent_of(_serving(launcher, tmp_path)) == server


def test_a_worker_ends_with_its_engine_even_if_it_is_stopped(launcher: Launcher, tmp_path: Path) -> None:
    program = _serving(launcher, tmp_path)
    assert program.pid is not None
    os.kill(program.pid, signal.SIGSTOP)
    program._connection.close()  # as the kernel does when a process ends
    _wait(lambda: _has_ended(program.pid or 0))


def test_a_worker_ends_with_its_engine_even_if_the_fork_server_is_stopped(launcher: Launcher, tmp_path: Path) -> None:
    program = _serving(launcher, tmp_path)
    server = _parent_of(program)
    os.kill(server, signal.SIGSTOP)
    program._connection.close()
    _wait(lambda: _has_ended(program.pid or 0))
    os.kill(server, signal.SIGCONT)


def test_a_fork_that_fails_harms_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be too little memory for one more, while other workers serve."""
    monkeypatch.setattr(fork_server, "_write_to", len)

    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    ours, theirs = socket.socketpair()
    with listen(tmp_path) as listener, ours:
        thread = threading.Thread(target=ForkServer(listener, theirs, "libraries").run)
        thread.start()
        for _ in range(2):
            refused = connect(tmp_path, Request("libraries", "a worker"))
            assert refused is not None
            assert forking.receive_worker(refused) is None
            refused.close()
        ours.sendall(END)
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_variable_may_hold_any_bytes_and_a_working_directory_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the engine would end whenever it starts a worker."""
    request = Request("libraries", environment={"AUTHOR": os.fsdecode(b"J\xf6rg")})
    with listen(tmp_path) as listener, ThreadPoolExecutor(1) as thread:
        connected = thread.submit(connect, tmp_path, request)
        accepted = forking.accept(listener)
        assert accepted is not None
        assert accepted[1] == request
        assert digest_of_libraries({"LANG": request.environment["AUTHOR"]})
        for connection in (accepted[0], connected.result()):
            assert connection is not None
            connection.close()
    (tmp_path / "gone").mkdir()
    start = _start(tmp_path)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert Launcher(tmp_path)._fork(HERE, start) is None


def test_whoever_waits_for_the_end_of_an_engines_output_waits_for_no_fork_server(tmp_path: Path) -> None:
    """As a shell does that runs `tinsmith serve | tee log`. The next engine's output is its own then."""
    code = (
        "from tinsmith.worker import fork_server; fork_server.import_libraries = int; "
        "fork_server.digest_of_libraries = lambda _: 'libraries'; fork_server.main()"
    )
    ours, theirs = socket.socketpair()
    program = [REAL_PYTHON, "-c", code, str(tmp_path)]
    with subprocess.Popen(program, stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        theirs.close()
        _wait(lambda: connect(tmp_path, Request("of another test")))
        ours.close()
        assert server.stdout is not None
        assert server.stdout.read() == b""
        assert server.poll() is None
        read, write = os.pipe()
        keeper = connect(tmp_path, Request("libraries"), (write, write))
        assert keeper is not None
        os.close(write)
        _wait(lambda: Path(f"/proc/{server.pid}/fd/1").samefile(f"/proc/self/fd/{read}"))
        os.close(read)
        keeper.sendall(END)
        keeper.close()
        assert server.wait(LONG_S) == 0


def test_the_next_engine_goes_on_with_the_fork_server_and_ends_it(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher._fork_server is not None
    assert launcher._keeper is not None
    server = process_behind(launcher._fork_server.pid)
    launcher._keeper.close()
    following = Launcher(tmp_path)
    program = _serving(following, tmp_path)
    assert _parent_of(program) == server
    following.stand_by(HERE, False)
    assert following._fork_server is None
    program.kill()
    program.wait()
    following.close()
    _wait(lambda: _has_ended(server))


def test_other_libraries_are_not_forked(launcher: Launcher, tmp_path: Path) -> None:
    """One that was started with other threads, or from files that have changed, is of no use: it ends."""
    assert launcher._fork_server is not None
    server = process_behind(launcher._fork_server.pid)
    program = launcher.launch(Surroundings(WORKER, {"OMP_NUM_THREADS": "7"}), _start(tmp_path))
    assert not isinstance(program, ForkedProgram)
    program.kill()
    assert program.wait(LONG_S) is not None
    _wait(lambda: _has_ended(server))
    assert not isinstance(launcher.launch(HERE, _start(tmp_path)), ForkedProgram)


def test_libraries_are_others_when_a_file_or_a_variable_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_PACKAGE", tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "packages"))
    (tmp_path / "packages").mkdir()
    file = tmp_path / "module.py"
    file.write_text("a = 1")
    seen = [digest_of_libraries({"HOME": "/a"}), digest_of_libraries({"HOME": "/b"})]
    os.utime(file, ns=(1, 1))
    seen.append(digest_of_libraries({}))
    (tmp_path / "packages" / "torch").mkdir()
    seen += [digest_of_libraries(given) for given in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, {"HF_HUB_OFFLINE": "1"})]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7})
    seen.append(digest_of_libraries({}))
    assert seen[0] == seen[1]
    assert len(set(seen[1:])) == 6


def test_workers_end_with_a_fork_server_that_is_killed_and_the_next_imports_its_libraries(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = _serving(launcher, tmp_path)
    os.kill(_parent_of(program), signal.SIGKILL)
    assert program.wait(LONG_S) == -signal.SIGKILL
    following = launcher.launch(HERE, _start(tmp_path))
    assert not isinstance(following, ForkedProgram)
    assert following.wait(LONG_S) == 2
    launcher.stand_by(HERE, False)
    _wait(lambda: connect(tmp_path, Request("of another test")))


def test_a_stopped_fork_server_delays_nobody_for_long(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher._fork_server is not None
    os.kill(process_behind(launcher._fork_server.pid), signal.SIGSTOP)
    monkeypatch.setattr(forking, "PATIENCE_S", 0.1)
    assert not isinstance(launcher.launch(HERE, _start(tmp_path)), ForkedProgram)
    assert launcher._fork_server is None


def test_workers_check_less_once_others_with_their_libraries_were_ready(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next engine does not know whether there were any: the fork server does."""
    first = _serving(launcher, tmp_path)  # passes the full check
    _wait_for_output(capfd, "passes its self-check")
    for are_ready, says in ((False, "the quick self-check runs"), (True, "is not checked again")):
        launcher.stand_by(HERE, are_ready)
        program = _serving(launcher, tmp_path)
        _wait_for_output(capfd, says)
        program.kill()
    first.kill()


@pytest.mark.parametrize("said", [END, b""])
def test_a_fork_server_ends_when_it_is_told_or_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(fork_server, "ABANDONED_S", 0.05 if not said else LONG_S)
    monkeypatch.setattr(fork_server, "_write_to", len)
    ours, theirs = socket.socketpair()
    with listen(tmp_path) as listener, ours:
        server = ForkServer(listener, theirs, "libraries")
        thread = threading.Thread(target=server.run)
        thread.start()
        following = connect(tmp_path, Request("libraries"))
        assert following is not None
        ours.close()
        thread.join(0.2)
        assert thread.is_alive()  # the next engine keeps it
        following.sendall(said)
        following.close()
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_what_is_no_request_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but its user reaches the socket, whatever the length of its path; what is cut short harms nobody."""
    monkeypatch.setattr(fork_server, "_write_to", len)
    home = tmp_path / ("long" * 40)
    home.mkdir()
    ours, theirs = socket.socketpair()
    with listen(home) as listener, ours:
        assert (home / forking.SOCKET).stat().st_mode & 0o777 == 0o600
        thread = threading.Thread(target=ForkServer(listener, theirs, "libraries").run)
        thread.start()
        for body in (b"", b"\0" * 8, (5).to_bytes(8, "big") + b"{}", (2).to_bytes(8, "big") + b"{}"):
            with socket.socket(socket.AF_UNIX) as stranger, forking._path_of(home) as path:
                stranger.connect(path)
                stranger.sendall(body)
        refused = connect(home, Request("others"))
        assert refused is not None
        assert refused.recv(1) == b""
        assert connect(home, Request("libraries")) is not None
        ours.sendall(END)
        thread.join(LONG_S)
        assert not thread.is_alive()
