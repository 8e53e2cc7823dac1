"""Kills processes of servers at random moments of SFT and RL runs, whose curves must be those of quiet servers.

Run it with: python -m benchmarks.chaos [--kills 50] [--jobs 14] [--limit-s 480] [--out DIR], or `make chaos`

A run has a server of its own, with one worker or two. In each, everything in `VICTIMS` is killed or stopped once, in
random order, and the next when some operations have ended since. Runs are spread over `--jobs`, and each writes what it
has found after each signal; `--join DIR` alone makes table and picture of that (`chaos_table.py`). Every operation must
succeed once, and in float32 on a CPU the curves must be those of the quiet runs to the last bit. Recovery is the time
from the signal to the end of the first operation that was sent after it.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import psutil
import tinker
from tinker import types

from benchmarks.chaos_table import Finding, Kill, draw, read, read_file, table
from benchmarks.servers import API_KEY, BASE_MODEL, random_datums
from tests.databases import run_sql
from tests.running import REAL_PROGRAM, Server, serving
from tinsmith.models.tiny import write_tiny_model

OPTIONS = (
    *("--tokens-per-pass", "512", "--device", "cpu"),
    *("--worker-still-s", "5", "--engine-silent-s", "2"),
)
"""What is stopped is found soon, and operations take several passes."""

PROMPTS, ASKED, ANSWER = 8, 120, 12
"""Prompts of an RL step, and tokens of each and of its answer: the body is large enough for the parser."""

VOCABULARY = 2048

TEXTS = 4
"""Batches of an SFT run, which learns them by heart."""

STOPPED_S = 3.0
"""Seconds for which a server is stopped. Nobody ends it: it may be that its machine slept."""

MOST_S = 600.0
"""Seconds after which a run that does not come on has failed."""

LONGEST_S = 3600.0
"""Seconds after which a run is ended from outside: it hangs."""

Victims = tuple[tuple[str, signal.Signals], ...]
"""Processes that get their signals together."""

VICTIMS: Sequence[Victims] = (
    (("worker", SIGKILL),),
    (("engine", SIGKILL),),
    (("server", SIGKILL),),
    (("parser", SIGKILL),),
    (("parser", SIGSTOP),),
    (("worker", SIGSTOP),),
    (("engine", SIGSTOP),),
    (("server", SIGSTOP),),
    (("engine", SIGKILL), ("worker", SIGKILL)),
    (("worker", SIGSTOP), ("engine", SIGKILL)),
    (("engine", SIGSTOP), ("server", SIGKILL)),
    (("server", SIGKILL), ("engine", SIGKILL), ("worker", SIGKILL), ("parser", SIGKILL)),
)

OF_VLLM: Sequence[Victims] = (
    (("vLLM server", SIGKILL),),
    (("vLLM engine", SIGKILL),),
    (("vLLM engine", SIGSTOP),),
    (("worker", SIGKILL),),
    (("engine", SIGKILL), ("vLLM engine", SIGSTOP)),
    (("worker", SIGKILL), ("vLLM server", SIGSTOP)),
)
OF_RAY: Sequence[Victims] = (
    (("Ray actor", SIGKILL),),
    (("Ray worker", SIGKILL),),
    (("Ray worker", SIGSTOP),),
    (("Ray actor", SIGSTOP), ("Ray worker", SIGKILL)),
    (("engine", SIGKILL),),
    (("engine", SIGKILL), ("Ray worker", SIGSTOP)),
    (("server", SIGKILL), ("engine", SIGKILL), ("Ray actor", SIGKILL)),
)
PLACES = {"here": VICTIMS, "vllm": OF_VLLM, "ray": OF_RAY}
"""What runs there can be killed: workers sample with vLLM, or are actors of Ray."""

MODULES = {"engine": "tinsmith.engine", "parser": "tinsmith.server.parser_process"}
"""Modules that victims run; servers are known, and workers have names."""


@dataclass(eq=False)
class Run:
    """A training run and its curve: what each operation has given, in order."""

    curve: list[tuple[str, float]] = field(default_factory=list)
    """What each number is, and the number."""
    operations: int = 0
    """Operations that have ended."""
    samples: int = 0
    """Those of them that are samples: they are not in the log."""
    newest: float = 0.0
    """When the newest of them was sent, in seconds of the monotonic clock."""

    def send(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Send an operation; returns what waits for its result."""
        sent, future = time.monotonic(), operation()

        def result() -> Any:
            found = future.result(timeout=MOST_S)
            self.operations += 1
            self.newest = max(self.newest, sent)
            return found

        return result

    def train(self, client: tinker.TrainingClient, data: list[types.Datum], loss: types.LossFnType) -> None:
        """Take a step, both operations of which are sent at once."""
        passed = self.send(lambda: client.forward_backward(data, loss))
        stepped = self.send(lambda: client.optim_step(types.AdamParams(learning_rate=3e-3)))
        self.curve.append(("loss", passed().metrics["loss:sum"]))
        self.curve.append(("gradient norm", (stepped().metrics or {})["grad_norm"]))


def sft(service: tinker.ServiceClient, run: Run, goes_on: Callable[[], bool], rank: int = 8) -> None:
    """Learn a few texts; steps gather gradients of two calls, and some are saved."""
    client = run.send(lambda: service.create_lora_training_client(base_model=BASE_MODEL, rank=rank, seed=1))()
    step = 0
    while goes_on():
        step += 1
        more = random_datums([300, 200, 100], seed=1000 + step % TEXTS)
        gathered = run.send(partial(client.forward_backward, more, "cross_entropy"))
        run.curve.append(("gathered", gathered().metrics["loss:sum"]))
        run.train(client, random_datums([200] * 6, seed=step % TEXTS), "cross_entropy")
        if step % 5 == 0:
            run.send(partial(client.save_state, f"step-{step}"))()


def rl(service: tinker.ServiceClient, run: Run, goes_on: Callable[[], bool]) -> None:
    """Sample answers with the newest weights, and reinforce small tokens."""
    client = run.send(lambda: service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=2))()
    step = 0
    while goes_on():
        step += 1
        sampler = run.send(client.save_weights_and_get_sampling_client)()
        params = types.SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=step, stop=[])
        prompts = [list(range(10 * number, 10 * number + ASKED)) for number in range(1, PROMPTS + 1)]
        answered = [
            run.send(partial(sampler.sample, types.ModelInput.from_ints(prompt), 1, params)) for prompt in prompts
        ]
        data, rewards = [], []
        for prompt, result in zip(prompts, answered, strict=True):
            answer = result().sequences[0]
            run.curve += [("token", float(token)) for token in answer.tokens]
            rewards.append(sum(token < VOCABULARY // 2 for token in answer.tokens) / ANSWER)
            before = len(prompt) - 1
            inputs = {
                "target_tokens": [*prompt[1:], *answer.tokens],
                "logprobs": [0.0] * before + list(answer.logprobs),
                "advantages": [0.0] * before + [rewards[-1] - 0.5] * len(answer.tokens),
            }
            tokens = types.ModelInput.from_ints([*prompt, *answer.tokens[:-1]])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))  # type: ignore[arg-type]
        run.samples += PROMPTS
        run.curve.append(("reward", sum(rewards) / PROMPTS))
        run.train(client, data, "importance_sampling")


Kind = Callable[[tinker.ServiceClient, Run, Callable[[], bool]], None]
KINDS: dict[str, Kind] = {"sft": sft, "rl": rl, "full": partial(sft, rank=0)}
"""The last trains all weights, of which copies are more seldom."""


@contextmanager
def serving_in(place: str, workers: int, program: list[str]) -> Iterator[Server]:
    """Serve a tiny model."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tiny_model("qwen3", directory / "model", hidden=64, layers=2, vocab=VOCABULARY)
        options = ["--base-model", f"{BASE_MODEL}={directory / 'model'}", "--workers", str(workers), *OPTIONS]
        if place == "ray":
            from tests.ray_head import ray_head  # which may not be installed

            options += ["--ray-address", stack.enter_context(ray_head(workers))]
        if place == "vllm":
            from tests.with_vllm.serving import PYTHON, wait_for_vllm

            options += ["--sampler", "vllm", "--vllm-python", str(PYTHON), "--vllm-hung-s", "5", "--kv-cache-gib", "1"]
        else:  # samples depend on their request alone
            options += ["--deterministic", "--kv-cache-gib", "0.1"]
        server = stack.enter_context(serving(directory, *options, program=program))
        server.wait_for_health()
        if place == "vllm":
            wait_for_vllm(server)
        yield server


def trained(server: Server, kind: str, run: Run, goes_on: Callable[[], bool]) -> None:
    """Let a run go on until it is told to end."""
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        KINDS[kind](service, run, goes_on)


def not_once(server: Server, run: Run) -> str:
    """Which operations the server has recorded to have succeeded; empty if they are those of the run, each once."""
    succeeded = "SELECT seq_id FROM commands WHERE status = 'done' AND error IS NULL ORDER BY seq_id"
    recorded = [seq_id for (seq_id,) in run_sql(server.data_dir, succeeded)]
    is_once = recorded == list(range(run.operations - run.samples))  # of a single model
    return "" if is_once else f"these are recorded to have succeeded: {recorded}"


def pids_of(server: Server, victim: str) -> list[int]:
    """The processes of a victim."""
    if victim == "server":
        return [server.pid]
    if victim == "worker":
        return server.worker_pids()
    if victim.startswith("vLLM"):
        from tests.with_vllm.serving import process_of, vllm_pids

        groups = vllm_pids(server)
        return groups if victim == "vLLM server" else [process_of(group, "EngineCore") for group in groups]
    if victim.startswith("Ray"):
        with server.client() as client:
            status = client.get("status").json()
        workers = [worker["pid"] for worker in status["workers"] if worker["state"] == "ready"]
        return workers if victim == "Ray worker" else [psutil.Process(pid).ppid() for pid in workers]
    return [server.child_of(server.pid, MODULES[victim])]


@dataclass(eq=False)
class Chaos:
    """Kills victims while a run goes on, and measures how long it takes to come on again.

    A server that has ended is started again at once, as a supervisor does.
    """

    server: Server
    run: Run
    finding: Finding
    chance: random.Random
    until: float
    """When the last signal may be sent, in seconds of the monotonic clock."""
    write: Callable[[], None]
    """Writes the finding."""
    has_ended: threading.Event = field(default_factory=threading.Event)

    def goes_on(self) -> bool:
        """Whether the run is to go on."""
        return not self.has_ended.is_set()

    def rage(self, victims: Sequence[Victims]) -> None:
        """Kill one after the other."""
        try:
            for each in victims:
                self._wait(lambda done=self.run.operations: self.run.operations >= done + 3)  # type: ignore[misc]
                if time.monotonic() > self.until:
                    return
                time.sleep(self.chance.uniform(0.0, 1.0))
                self._kill(each)
                self.write()
        finally:
            self.has_ended.set()

    def _kill(self, victims: Victims) -> None:
        pids = [self.chance.choice(self._wait(partial(pids_of, self.server, name))) for name, _ in victims]
        place, started = len(self.run.curve), time.monotonic()
        for pid, (_, sign) in zip(pids, victims, strict=True):
            os.kill(pid, sign)
        if ("server", SIGSTOP) in victims:
            time.sleep(STOPPED_S)
            os.kill(self.server.pid, signal.SIGCONT)
        self._wait(lambda: self.run.newest > started)
        came_s = time.monotonic() - started
        ended = [pid for pid, each in zip(pids, victims, strict=True) if each != ("server", SIGSTOP)]
        self._wait(lambda: not any(map(lives, ended)))  # none holds its device any more
        self.finding.kills.append(Kill(named(victims), place, came_s))

    def _wait(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + MOST_S
        while not (found := look()):
            assert time.monotonic() < deadline, "no operation has ended"
            assert self.goes_on(), "the run has ended"
            if self.server.process.poll() is not None:
                self.server.start_again()
            time.sleep(0.005)
        return found


def lives(pid: int) -> bool:
    """Whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def named(victims: Victims) -> str:
    """Name what gets which signal."""
    signs = {sign: [name for name, its in victims if its == sign] for _, sign in victims}
    return ", ".join(f"{sign.name} {' and '.join(names)}" for sign, names in signs.items())


@dataclass(frozen=True)
class Task:
    """A run with one or two workers, which the victims disturb; without any it is quiet."""

    kind: str
    workers: int
    place: str = "here"
    number: int = 0
    victims: Sequence[Victims] = ()

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.place}-{self.workers}-{self.number:03}.json"

    def finding(self) -> Finding:
        """Nothing yet."""
        return Finding(self.kind, self.workers, not self.victims, self.place)


def disturb(task: Task, out: Path, seed: int, until: float = float("inf"), program: list[str] = REAL_PROGRAM) -> None:
    """Run a task, and write what is found into `out` as it comes; what an operation fails with is a part of it."""
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # it says each time that no server answers
    run, finding = Run(), task.finding()
    finding.curve = run.curve
    chance = random.Random(f"{seed} {task.file}")

    def write() -> None:
        finding.operations = run.operations
        finding.write(out / task.file)

    with serving_in(task.place, task.workers, program) as server:
        wild = Chaos(server, run, finding, chance, until, write)
        with ThreadPoolExecutor(2) as threads:
            training = threads.submit(trained, server, task.kind, run, wild.goes_on)
            training.add_done_callback(lambda _: wild.has_ended.set())
            raging = threads.submit(wild.rage, chance.sample(task.victims, len(task.victims)))
        error = training.exception() or raging.exception()
        finding.failed = repr(error) if error else not_once(server, run)
        if finding.failed:
            (out / task.file).with_suffix(".log").write_text(server.log.read_text())
        write()


def keep_quiet(task: Task, out: Path, program: list[str] = REAL_PROGRAM) -> None:
    """Run undisturbed for as long as the longest of the disturbed runs of the same kind."""
    run, finding = Run(), task.finding()
    finding.curve, length = run.curve, longest(out, task)
    with serving_in(task.place, task.workers, program) as server:
        trained(server, task.kind, run, lambda: len(run.curve) < length)
    finding.write(out / task.file)


def longest(out: Path, task: Task) -> int:
    """Numbers in the longest curve of the same kind."""
    return max((len(found.curve) for found in read([out]) if found.is_like(task.finding())), default=0)


def tasks(kills: int, place: str) -> list[Task]:
    """The runs, in which everything there is killed at least so many times together; kinds take turns."""
    combinations = [(kind, workers) for workers in (1, 2) for kind in KINDS]
    rounds = -(-kills // len(combinations))
    victims = PLACES[place]
    return [
        Task(kind, workers, place, number, victims) for number in range(1, rounds + 1) for kind, workers in combinations
    ]


def alone(target: Callable[..., None], task: Task, out: Path, *arguments: object) -> None:
    """Run a task in a process of its own. One that hangs is ended with all that it has started, and has failed."""
    file = out / task.file
    task.finding().write(file)
    process = get_context("spawn").Process(target=target, args=(task, out, *arguments))
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        hanging = psutil.Process(process.pid)
        for each in [*hanging.children(recursive=True), hanging]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.join()
    if process.exitcode:
        finding = read_file(file)
        finding.failed = finding.failed or f"it hung, or ended with exit code {process.exitcode}"
        finding.write(file)


def run_all(out: Path, disturbed: Sequence[Task], seed: int, jobs: int, until: float) -> None:
    """Run tasks, `jobs` at a time, and then quiet runs of each kind."""

    def begin(task: Task) -> None:
        if time.monotonic() < until:
            alone(disturb, task, out, seed, until)

    kinds = dict.fromkeys((task.kind, task.workers, task.place) for task in disturbed)
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(begin, task) for task in disturbed]:
            done.result()
        quiet = [task for task in (Task(*kind) for kind in kinds) if longest(out, task)]
        for done in [pool.submit(alone, keep_quiet, task, out) for task in quiet]:
            done.result()


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="times that everything is killed, over all runs together")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(1, processors - 2), help="runs at a time: a processor each")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--place", choices=PLACES, default="here", help="where workers sample, or run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory for what is found; otherwise one that is deleted")
    parser.add_argument("--join", type=Path, nargs="+", help="run nothing: read these directories")
    parser.add_argument("--picture", type=Path, default=Path("benchmarks/results/chaos.svg"))
    asked = parser.parse_args()
    until = time.monotonic() + asked.limit_s
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TINSMITH_ENGINE_HUNG_S", "20")  # more where others keep it from starting
    with tempfile.TemporaryDirectory() as temporary:
        out = asked.out or Path(temporary) / "found"
        if not asked.join:
            out.mkdir(parents=True, exist_ok=True)
            run_all(out, tasks(asked.kills, asked.place), asked.seed, asked.jobs, until)
        findings = read(asked.join or [out])
    lines, is_good = table(findings)
    print("\n".join(lines), flush=True)
    draw(findings, asked.picture)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
