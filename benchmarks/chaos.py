"""Kills processes of a server at random moments of an SFT and an RL run, whose curves must be those of a quiet server.

Run it with: python -m benchmarks.chaos [--kills 50] [--seed 0], or `make chaos`

One run after the other: datums of two models may share a pass, and round otherwise. A victim is killed or stopped, and
the next one when some operations have ended since. Every operation must succeed once, and in float32 on a CPU the
curves must be equal to the last bit. A line of the table is a kind of victim; its seconds go from the signal to the
next finished operation.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tinker
from tinker import types

from benchmarks.servers import API_KEY, BASE_MODEL, random_datums
from tests.running import REAL_PROGRAM, Server, serving
from tinsmith.models.tiny import write_tiny_model

OPTIONS = ("--kv-cache-gib", "0.1", "--deterministic", "--worker-still-s", "5", "--tokens-per-pass", "512")
"""A stopped worker is found soon, samples depend on their request alone, and operations take several passes."""

PROMPTS, ANSWER = 4, 12
"""Prompts of an RL step, and tokens of each answer."""

VICTIMS = (("worker", signal.SIGKILL), ("worker", signal.SIGSTOP), ("parser", signal.SIGKILL))

MODULES = {"worker": "tinsmith.worker", "parser": "tinsmith.server.parser_process"}
"""Modules that victims run."""

MOST_S = 600.0
"""Seconds after which a run that does not come on has failed."""


@dataclass(eq=False)
class Run:
    """A training run and its curve: each number of each operation, in order."""

    curve: list[float] = field(default_factory=list)

    def train(self, client: tinker.TrainingClient, data: list[types.Datum], loss: types.LossFnType) -> None:
        """Take a step, both operations of which are sent at once."""
        passed = client.forward_backward(data, loss)
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
        self.curve.append(passed.result(timeout=MOST_S).metrics["loss:sum"])
        self.curve.append((stepped.result(timeout=MOST_S).metrics or {})["grad_norm"])


def sft(service: tinker.ServiceClient, run: Run, goes_on: Callable[[], bool]) -> None:
    """Train on random texts; some steps gather gradients of several calls, and some are saved."""
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=1).result()
    step = 0
    while goes_on():
        step += 1
        gathered = client.forward_backward(random_datums([300, 200, 100], seed=1000 + step), "cross_entropy")
        run.curve.append(gathered.result(timeout=MOST_S).metrics["loss:sum"])
        run.train(client, random_datums([200] * 6, seed=step), "cross_entropy")
        if step % 5 == 0:
            client.save_state(f"step-{step}").result(timeout=MOST_S)


def rl(service: tinker.ServiceClient, run: Run, goes_on: Callable[[], bool]) -> None:
    """Sample answers with the newest weights, and reinforce small tokens."""
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=2).result()
    step = 0
    while goes_on():
        step += 1
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=step, stop=[])
        prompts = [list(range(10 * number, 10 * number + 6)) for number in range(1, PROMPTS + 1)]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
        data = []
        for prompt, future in zip(prompts, futures, strict=True):
            answer = future.result(timeout=MOST_S).sequences[0]
            assert answer.logprobs is not None
            run.curve += [float(token) for token in answer.tokens]
            before = len(prompt) - 1
            advantage = 1.0 if sum(answer.tokens) < 1000 * ANSWER else -1.0
            inputs = {
                "target_tokens": [*prompt[1:], *answer.tokens],
                "logprobs": [0.0] * before + list(answer.logprobs),
                "advantages": [0.0] * before + [advantage] * len(answer.tokens),
            }
            tokens = types.ModelInput.from_ints([*prompt, *answer.tokens[:-1]])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))  # type: ignore[arg-type]
        run.train(client, data, "importance_sampling")


KINDS = (sft, rl)


@contextmanager
def server_in(directory: Path, program: list[str]) -> Iterator[Server]:
    """Serve a tiny model from a new directory."""
    directory.mkdir()
    write_tiny_model("qwen3", directory / "model", hidden=64, layers=2, vocab=2048)
    model = f"{BASE_MODEL}={directory / 'model'}"
    with serving(directory, "--base-model", model, *OPTIONS, program=program) as server:
        server.wait_for_health()
        yield server


def trained(server: Server, kind: Callable[..., None], run: Run, goes_on: Callable[[], bool]) -> None:
    """Let a run go on until it is told to end."""
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        kind(service, run, goes_on)


def pid_of(server: Server, victim: str) -> int:
    """The process id of a victim, as soon as there is one."""
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline:
        with suppress(psutil.Error):  # one has ended meanwhile
            for child in psutil.Process(server.process.pid).children(recursive=True):
                if MODULES[victim] in child.cmdline() and (victim != "worker" or child.name() == victim):
                    return child.pid  # and no worker that stands by
        time.sleep(0.01)
    raise AssertionError(f"there is no {victim}")


@dataclass(eq=False)
class Found:
    """What has come of it."""

    runs: dict[str, Run] = field(default_factory=dict)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From each signal to the next finished operation, by victim."""


@dataclass(eq=False)
class Chaos:
    """Kills victims while a run goes on, and measures how long it then takes until one of its operations has ended."""

    server: Server
    run: Run
    chance: random.Random
    seconds: defaultdict[str, list[float]]
    """From each signal to the next finished operation, by victim."""
    find: Callable[[Server, str], int]
    """Finds the process of a victim."""
    has_ended: threading.Event = field(default_factory=threading.Event)

    def goes_on(self) -> bool:
        """Whether the run is to go on."""
        return not self.has_ended.is_set()

    def rage(self, victims: Sequence[tuple[str, signal.Signals]]) -> None:
        """Kill one victim after the other."""
        try:
            for victim, sign in victims:
                self._wait(len(self.run.curve) + 3)
                time.sleep(self.chance.uniform(0.0, 1.0))
                before, started = len(self.run.curve), time.monotonic()
                os.kill(self.find(self.server, victim), sign)
                self._wait(before + 1)
                self.seconds[f"{victim} {sign.name}"].append(time.monotonic() - started)
        finally:
            self.has_ended.set()

    def _wait(self, length: int) -> None:
        deadline = time.monotonic() + MOST_S
        while len(self.run.curve) < length:
            assert time.monotonic() < deadline, "no operation has ended"
            time.sleep(0.005)


def chaos(
    directory: Path,
    kills: int,
    seed: int,
    victims: Sequence[tuple[str, signal.Signals]] = VICTIMS,
    program: list[str] = REAL_PROGRAM,
    find: Callable[[Server, str], int] = pid_of,
) -> Found:
    """Compare disturbed runs with quiet ones; `kills` signals are sent during each.

    Raises what an operation failed with, and AssertionError if a curve is another one.
    """
    found, chance = Found(), random.Random(seed)
    each = [victims[number % len(victims)] for number in range(kills)]
    with server_in(directory / "disturbed", program) as server:
        for kind in KINDS:
            run = found.runs[kind.__name__] = Run()
            wild = Chaos(server, run, chance, found.seconds, find)
            with ThreadPoolExecutor(1) as thread:
                raging = thread.submit(wild.rage, each)
                trained(server, kind, run, wild.goes_on)
                raging.result()
    with server_in(directory / "quiet", program) as server:
        for kind in KINDS:
            require_same(server, kind, found.runs[kind.__name__].curve)
    return found


def require_same(server: Server, kind: Callable[..., None], disturbed: list[float]) -> None:
    """Run undisturbed for as long; raises AssertionError for the first number that is another one."""
    run = Run()
    trained(server, kind, run, lambda: len(run.curve) < len(disturbed))
    for place, (other, quiet) in enumerate(zip(disturbed, run.curve, strict=False)):
        assert other == quiet, f"{kind.__name__}: number {place} is {other}, and {quiet} in a quiet run"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="signals that are sent in each run")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = chaos(Path(directory), asked.kills, asked.seed)
    print("| victim | signals | median s | slowest s |\n|---|---|---|---|")
    for victim, times in found.seconds.items():
        print(f"| {victim} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")
    lengths = ", ".join(f"{name} {len(run.curve)}" for name, run in found.runs.items())
    print(f"The curves equal those of a quiet server to the last bit; numbers compared: {lengths}.")


if __name__ == "__main__":
    main()
