"""Workers as actors of a real Ray: they are started, watched and ended as child processes are, and train as one does,
also on two hosts.

Invariant: Two workers in actors of a real Ray train as one does, also on two hosts; one that dies, hangs or loses its
actor, and a host that vanishes, is named and replaced, and none outlives the server.
"""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.distributed.devices import ON_GPUS
from tests.preloaded import REAL_PYTHON

if ON_GPUS:  # where it need not be installed, and where nothing of this computes
    pytest.importorskip("ray", reason="Ray is not installed here")

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import assert_close, datum, logprobs, text_input, train
from tests.engine.test_worker_process import Watched, link_of_an_engine
from tests.ray_head import another_host, core_taken, own_node, ray_head
from tests.running import REAL_PROGRAM, START_S, Server, serving, tinsmith_here
from tinsmith.config import Config, DistributedConfig, ModelsConfig
from tinsmith.engine.ray_actor import why_not
from tinsmith.engine.ray_workers import RayActors
from tinsmith.errors import ConfigError

CORES = 2
STEP = types.AdamParams(learning_rate=0.005, beta1=0.9, beta2=0.95, eps=1.0)
"""Small enough that rounding does not grow from step to step."""
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
OTHER_HOST = "127.0.0.2"
SILENT_S = "20"
"""How long a worker may be silent, in seconds: as long as a busy machine may keep it from running."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray for all tests here. Nothing of it is left, and nobody elsewhere could reach it."""
    with ray_head(CORES) as address:
        running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        (head,) = (child for child in running if "tests.ray_head" in child.cmdline())
        processes = [head, *head.children(recursive=True)]
        listening = [
            each.laddr
            for process in processes
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        assert {each.ip.removeprefix("::ffff:") for each in listening} == {"127.0.0.1"}
        yield address
    _, left = psutil.wait_procs(processes, START_S)
    assert left == []


@pytest.fixture(scope="module")
def other_host(address: str) -> Iterator[psutil.Process]:
    """Another host of that Ray, with a core: all that runs there are children of this process.

    Its end is the test's.
    """
    with another_host(address, OTHER_HOST, 1) as host:
        yield host


def configured(address: str, data_dir: Path, workers: int = 1, device: str = "auto") -> Config:
    distributed = DistributedConfig(workers=workers, ray_address=address)
    return Config(["tiny=unused"], str(data_dir), distributed=distributed, models=ModelsConfig(device=device))


@contextmanager
def watched(address: str, data_dir: Path, how: str) -> Iterator[Watched]:
    """A worker without models, in an actor."""
    with link_of_an_engine() as (_, link), closing(RayActors(configured(address, data_dir), link.wake)) as actors:
        worker = Watched(link, how, actors)
        yield worker
        worker.process.stop(0.0)


def test_a_worker_in_an_actor_answers_ends_and_is_started_again_as_a_child_is(address: str, tmp_path: Path) -> None:
    with watched(address, tmp_path, "ready") as worker:
        assert worker.start()
        worker.ask("a path")
        worker.until(lambda: worker.answers)
        assert worker.answers == ["a path"]
        first, actor = process_and_actor(worker.process.pid)
        assert "WorkerActor" in actor.cmdline()[0]
        first.kill()
        worker.until(lambda: worker.ends)
        assert worker.ends == ["the worker process ended unexpectedly (signal 9)"]
        second, actor = process_and_actor(start_again(worker))
        actor.kill()
        worker.until(lambda: len(worker.ends) == 2)
        assert "its Ray actor has ended" in worker.ends[-1]
        assert psutil.wait_procs([first, second, actor], START_S)[1] == []


@pytest.mark.slow  # each start takes seconds, and ends of other kinds are above
def test_a_worker_in_an_actor_hangs_ends_itself_with_a_reason_or_is_stopped(address: str, tmp_path: Path) -> None:
    with watched(address, tmp_path, "ready") as worker:
        first = psutil.Process(worker.start())
        worker.ask("lost")
        worker.until(lambda: worker.ends)
        assert worker.ends == ["the worker process ended unexpectedly (cuda:0 computes nothing any more)"]
        second = psutil.Process(start_again(worker))
        second.suspend()  # one that hangs
        worker.process.kill()
        worker.until(lambda: len(worker.ends) == 2)
        third = psutil.Process(start_again(worker))
        worker.process.stop(START_S)
        assert psutil.wait_procs([first, second, third], START_S)[1] == []


def process_and_actor(pid: int | None) -> tuple[psutil.Process, psutil.Process]:
    """A worker's process and its parent."""
    process = psutil.Process(pid)
    actor = process.parent()
    assert actor is not None
    return process, actor


def start_again(worker: Watched) -> int:
    """Start the next one, when it is time."""
    worker.until(lambda: worker.process.wait_s == 0)
    return worker.start()


def test_what_ray_does_not_have_is_said_with_its_remedy(address: str, tmp_path: Path) -> None:
    def refused(config: Config) -> str:
        with pytest.raises(ConfigError) as error:
            RayActors(config, lambda: None)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "Ray has 2 CPUs, 2 of them on this host (127.0.0.1)" in refused(configured(address, tmp_path, 3))
    assert "start Ray with --num-gpus, here or on other hosts" in refused(configured(address, tmp_path, 2, "cuda"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert f"--ray-address {nobody}: nobody answers there" in refused(configured(nobody, tmp_path))


def test_a_data_directory_that_the_actors_do_not_see_is_refused(address: str, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    with watched(address, directory, "ready") as worker:
        directory.rename(tmp_path / "elsewhere")
        worker.process.start_if_due()
        worker.until(lambda: worker.ends)
        assert f"does not see the server's data_dir={directory}; mount the same file system" in worker.ends[0]


def test_a_host_on_which_a_program_cannot_run_is_refused_with_what_it_lacks(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor imports nothing that lies in the working directory."""
    import ray  # which tests/ray_head.py has prepared

    monkeypatch.chdir(tmp_path)
    with closing(RayActors(configured(address, tmp_path), lambda: None)):
        assert str(tmp_path) not in ray.get(ray.remote(lambda: sys.path).remote(), timeout=START_S)
        node, mark = own_node(), tmp_path / "mark"
        mark.touch()
        shared = {"checkpoint_root": str(mark)}
        assert why_not(REAL_PYTHON, str(tmp_path), node, shared) == ""
        assert "moved it to another host" in why_not(REAL_PYTHON, str(tmp_path), "another", shared)
        assert "start it in one that all hosts see" in why_not(REAL_PYTHON, str(tmp_path / "elsewhere"), node, shared)
        assert "install Tinsmith and Python at the same path" in why_not(
            str(tmp_path / "python"), str(tmp_path), node, shared
        )
        mark.unlink()
        assert f"does not see the server's checkpoint_root={tmp_path}" in why_not(
            REAL_PYTHON, str(tmp_path), node, shared
        )
    assert list(tmp_path.iterdir()) == []  # what shows workers the directory goes with the engine


def step(model: tinker.TrainingClient) -> list[np.ndarray]:
    """Log-probabilities before a step."""
    work = [datum(text_input(seed, 5 + 9 * seed), seed) for seed in range(7)]
    found = logprobs(model.forward_backward(work, "cross_entropy").result(timeout=START_S))
    model.optim_step(STEP).result(timeout=START_S)
    return found


def sampled(model: tinker.TrainingClient) -> list[list[int]]:
    """Greedy answers of a model."""
    sampler = model.save_weights_and_get_sampling_client()
    replies = [sampler.sample(text_input(seed, 5), 1, GREEDY).result(timeout=START_S) for seed in range(4)]
    return [reply.sequences[0].tokens for reply in replies]


def workers_of(server: Server, hosts: int) -> list[psutil.Process]:
    """The processes of the workers, by rank: children of actors on so many hosts, not of the engine."""
    status = server.wait_for_status(lambda status: [worker["state"] for worker in status["workers"]] == ["ready"] * 2)
    assert len({worker["device"] for worker in status["workers"]}) == hosts
    found = [process_and_actor(worker["pid"]) for worker in status["workers"]]
    assert all("WorkerActor" in actor.cmdline()[0] for _, actor in found)
    return [process for process, _ in found]


# Two hosts and three starts of all workers; an actor's life is above, training of several workers in the other files
@pytest.mark.slow
def test_a_server_with_actors_on_two_hosts_trains_as_one_worker_and_survives_the_end_of_a_worker_and_of_a_host(
    address: str, other_host: psutil.Process, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """At last both are on the server's host."""
    options = [
        "--base-model",
        f"text={family_dir('qwen3')}",
        "--kv-cache-gib",
        "0.1",
        "--tokens-per-pass",
        "64",
        "--device",
        "cpu",
    ]
    (tmp_path / "alone").mkdir()
    with serving(tmp_path / "alone", *options) as alone:
        alone.wait_for_health()
        with tinker.ServiceClient(base_url=alone.url, api_key=API_KEY) as service:
            model = train(service, "text")
            expected = [step(model) for _ in range(5)]
            answers = sampled(model)
    assert np.abs(expected[4][6] - expected[3][6]).max() > 1e-3  # a step that is lost or doubled would be seen
    on_two = [
        *options,
        "--workers",
        "2",
        "--ray-address",
        address,
        "--worker-still-s",
        SILENT_S,
    ]
    with ExitStack() as taken, serving(tmp_path, *on_two, program=REAL_PROGRAM) as server:
        taken.enter_context(core_taken(address))
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            workers = workers_of(server, 2)
            opened = [file.path for worker in workers for file in worker.open_files()]
            assert [path for path in opened if "sqlite" in path or path.endswith((".db", ".db-wal", ".db-shm"))] == []
            model = train(service, "text")
            found = [step(model) for _ in range(2)]

            (away,) = (rank for rank, worker in enumerate(workers) if worker in other_host.children(recursive=True))
            name = f"worker {away} of 2 on {OTHER_HOST}: the worker process ended unexpectedly"
            workers[away].kill()
            server.wait_for_log(f"{name} (signal 9)")
            found.append(step(model))  # the model comes back as the steps before have left it

            again = workers_of(server, 2)
            (lost,) = (worker for worker in again if worker in other_host.children(recursive=True))
            raylet = next(process for process in other_host.children() if process.name() == "raylet")
            raylet.suspend()  # its host vanishes: nothing is said any more, and no connection ends
            there = other_host.children(recursive=True)
            for process in there:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            server.wait_for_log(
                f"{name} (it had shown no sign of life for {SILENT_S} s (worker_still_s) and was killed)"
            )
            raylet.kill()  # so Ray finds out, which takes it a minute otherwise
            server.wait_for_log("1 workers wait for Ray: their host is gone, and no other has room for them")
            taken.close()
            found.append(step(model))
            found.append(step(model))
            for process in there:  # the host comes back: what was forgotten there ends by itself
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            assert psutil.wait_procs([lost], START_S)[1] == []

            for ours, alones in zip(found, expected, strict=True):
                assert_close(ours, alones, atol=1e-5)
            assert sampled(model) == answers
            at_last = workers_of(server, 1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 0
    assert psutil.wait_procs([*workers, *again, *at_last], START_S)[1] == []
    said = server.log.read_text()
    assert "1 on 127.0.0.1, 1 on 127.0.0.2" in said or "1 on 127.0.0.2, 1 on 127.0.0.1" in said
    assert "worker 0" in said  # what the actors write
    assert "Traceback" not in said


def refused(*options: str) -> str:
    """Why a server with Ray is refused before anything starts."""
    result = tinsmith_here("serve", "--base-model", "tiny", "--ray-address", "auto", *options)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def test_what_cannot_be_combined_with_ray_is_refused_and_a_missing_ray_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "Ray gives each worker its GPU" in refused("--device", "cuda:1")
    assert "its servers would use GPUs that Ray has not reserved" in refused("--sampler", "vllm")
    assert "--ray-address='ray://here' must be one of auto" in refused("--ray-address", "ray://here")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert f"pip install -e '{Path(__file__).parents[2]}[ray]'" in refused()
