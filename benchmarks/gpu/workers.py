"""What several GPUs of one host, each with a base model, trainer and sampler, do in the time of one.

Every process has one GPU and meets the others as workers do. First the process of the first GPU computes alone, while
the others wait, then all compute at once. A part that fails in one process, or takes longer than `--limit`, ends all of
them: new ones go on with the next part. Parts:

- lora      Qwen3-8B, LoRA of rank 32, 4 sequences of 1,024 tokens on each GPU: one step with its sum of gradients
- sharded   the same with layers sharded over the GPUs (`--shard weights`), against replicas
- bare      the same training with FSDP2 of PyTorch around transformers and PEFT, with and without recomputation
- sequence  Qwen3-4B, LoRA of rank 32: one sequence of 262,144 tokens (`--sequences`) on all GPUs, half of it on one
- large     Qwen3.6-27B's shape, LoRA of rank 32, 2 sequences of 1,024 tokens on each GPU
- experts   Qwen3-30B-A3B, LoRA of rank 32 on attention and experts, 16 sequences of 1,024 tokens on each GPU of 141 GB
- full      Qwen3-1.7B, all weights, 4 sequences of 1,024 tokens on each GPU
- full8b    Qwen3-8B, all weights with a compact state, 8 sequences of 1,024 tokens on each GPU; it needs 141 GB
- sharded8b Qwen3-8B, all weights in float32, sharded, 8 sequences of 1,024 tokens on each GPU; two need 141 GB each
- bare8b    the same with FSDP2, with recomputation
- sampling  Qwen3-1.7B, 256 requests of 128 tokens on each GPU, which get 512 tokens each; and 256 in all
- publish   Qwen3-8B, LoRA of rank 32: a snapshot on every GPU, until a token of it is sampled on all of them
- save      the same adapter with its optimizer: how long training waits for one worker's copy on its device; no file
- rl        a step of reinforcement learning (`rl_step.py`) through a server with one worker, and with one for each GPU:
            the same requests, and as many for each
- rl_groups the same with 32 prompts of 16 samples each, as recipes sample: a GPU alone is busy then

Without `--parts` all but experts, full8b, sharded8b and bare8b are measured.

    python -m benchmarks.gpu.workers --count 2 --output benchmarks/results/workers.txt
    python -m benchmarks.gpu.workers --count 2 --parts sequence --sequences 65536,131072 --long-calls 1
    TINY=1 python -m benchmarks.gpu.workers --count 2
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import torch

from benchmarks.gpu.measuring import (
    DEVICE,
    TINY,
    Figures,
    begin_here,
    card,
    figure,
    finish,
    isolated,
    peak_memory,
    ratio,
    release,
    say,
    write_to,
)
from benchmarks.gpu.rivals import sharded_network, step_of, texts
from benchmarks.gpu.rl_step import LOAD, Batch, served
from benchmarks.gpu.sampling import ANSWER, PROMPT, Load, Requests, sample_all, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, flops_per_token
from benchmarks.gpu.training import batch_of, text_datum, train
from tinsmith.config import TrainingConfig
from tinsmith.errors import WorkersLostError
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.training.backend import LocalBackend
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sharded_backend import ShardedBackend
from tinsmith.training.parallel.sharded_layers import shard

PARTS = (
    "lora",
    "sharded",
    "bare",
    "sequence",
    "large",
    "experts",
    "full",
    "full8b",
    "sharded8b",
    "bare8b",
    "sampling",
    "publish",
    "save",
    "rl",
    "rl_groups",
)
LARGER = ("experts", "full8b", "sharded8b", "bare8b")
"""Parts that need more memory than two GPUs of 80 GB have."""
LENGTHS = [32] * 4 if TINY else [1024] * 4
SEQUENCES = (128, 256) if TINY else (131072, 262144)
"""Tokens of a sequence that one GPU trains, and of one that all compute together."""
ROWS = 8 if TINY else 256
RANK = 4 if TINY else 32
GROUPS = Batch(2, 4) if TINY else Batch(32, 16)
BEGIN_S = 240.0
"""Longest time in which processes import, meet and measure the card."""
WARM, CALLS = (2, 4) if TINY else (3, 12)


class Measured:
    """One process of the benchmark. The first says what all have done."""

    def __init__(self, group: ProcessGroup, sequences: Sequence[int], long_calls: int, folder: Path) -> None:
        """`sequences` and `long_calls` are of the part `sequence`.

        `folder` is the same for all processes, also for later ones.
        """
        self.group = group
        self.sequences, self.long_calls, self.folder = sequences, long_calls, folder
        self.is_first = group.place.rank == 0
        self.matmul = 0.0
        if self.is_first:
            figures = card()
            self.matmul = figures["matmul_tflops"]
            self.say("card", figures)
        release()
        self.meet()

    def meet(self) -> None:
        """Wait for the others."""
        finish()
        self.group.gather(0)

    def seconds(self, step: Callable[[], object], together: bool, warm: int = WARM, calls: int = CALLS) -> float:
        """The median of a step. All must take part in what is done together; what is not, the first does alone."""
        self.meet()
        times = []
        if together or self.is_first:
            for _ in range(warm + calls):
                finish()
                started = time.perf_counter()
                step()
                finish()
                times.append(time.perf_counter() - started)
        self.meet()
        return statistics.median(times[warm:]) if times else 0.0

    def say(self, name: str, figures: Figures) -> None:
        if self.is_first:
            say(case=name, **figures)

    def keep(self, name: str, rate: float) -> None:
        """Note a rate that another part compares with its own, perhaps in another process."""
        if self.is_first:
            (self.folder / name).write_text(repr(rate))

    def kept(self, name: str) -> float | None:
        """A rate that was noted; None if it was not measured."""
        file = self.folder / name
        return float(file.read_text()) if file.is_file() else None

    def training(
        self, name: str, shape: str, rank: int, wanted: str, sequences: int = 4, full_state: str = "float32"
    ) -> float:
        """One GPU against all, the same tokens on each. Returns the share of all cards' matmul rate, on the first."""
        config = configuration(shape)
        base = base_of(config)
        lengths = LENGTHS[:1] * sequences
        work = [text_datum("m", tokens) for tokens in batch_of(lengths)]
        rates, share = {}, 0.0
        for label, group in (("one", None), ("all", self.group)):
            backend = LocalBackend(base, TrainingConfig(full_state=full_state), group)
            backend.create_model("m", LoraShape(rank, seed=0, train_unembed=rank == 0))
            seconds = self.seconds(partial(train, backend, [work], ["m"]), together=group is not None)
            if self.is_first:
                rates[label] = sum(lengths) / seconds
                share = (
                    flops_per_token(config, lengths, rank == 0) * rates[label] / (self.matmul * 1e12)
                    if self.matmul
                    else 0.0
                )
                self.say(
                    f"{name}_{label}",
                    {"tokens_per_s_each": rates[label], "matmul_share": share, "step_s": seconds, **peak_memory()},
                )
            del backend
            release()
        if self.is_first:
            figure(f"{name}_scaling", self.group.count * rates["all"] / rates["one"], wanted)
        return share

    def lora(self) -> None:
        """LoRA over replicas."""
        self.training("lora", "8B", RANK, "at least 3.85 of 4, 1.92 of 2")

    def sharded(self) -> None:
        """Each GPU keeps its part of the layers, and all put a layer together when it is computed."""
        config = configuration("8B")
        base = base_of(config)
        work = [text_datum("m", tokens) for tokens in batch_of(LENGTHS)]
        rates = {}
        for label, kind in (("replicas", LocalBackend), ("sharded", ShardedBackend)):
            if kind is ShardedBackend:
                shard(base, self.group)
            release()
            backend = kind(base, TrainingConfig(), self.group)
            backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
            seconds = self.seconds(partial(train, backend, [work], ["m"]), together=True)
            rates[label] = sum(LENGTHS) / seconds if self.is_first else 0.0
            self.say(f"lora_{label}", {"tokens_per_s_each": rates[label], "step_s": seconds, **peak_memory()})
            del backend
            release()
        self.keep("sharded", rates["sharded"])
        if self.is_first:
            figure("sharded_over_replicas", rates["sharded"] / rates["replicas"], "said")

    def bare(self) -> None:
        """What a user of PyTorch has without us."""
        for checkpointing in (True, False):
            rate = self.bare_rate("bare", RANK, LENGTHS, checkpointing)
            if self.is_first and (ours := self.kept("sharded")):
                figure("sharded_over_bare", ours / rate, "at least 0.95", checkpointing=checkpointing)

    def bare8b(self) -> None:
        """The same with all weights, of which the masters are float32."""
        rate = self.bare_rate("bare8b", 0, LENGTHS[:1] * 8, checkpointing=True)
        if self.is_first and (ours := self.kept("sharded8b")):
            figure("sharded8b_over_bare", ours / rate, "said")

    def bare_rate(self, name: str, rank: int, lengths: list[int], checkpointing: bool) -> float:
        """Tokens per second of each GPU with FSDP2."""
        release()
        config = configuration("8B")
        step = step_of(sharded_network(config, rank, self.group.count, checkpointing), texts(batch_of(lengths)))
        seconds = self.seconds(step, together=True)
        rate = sum(lengths) / seconds
        flops = flops_per_token(config, lengths, rank == 0) * rate
        figures = {"matmul_share": flops / (self.matmul * 1e12)} if self.matmul else {}
        self.say(
            name,
            {"checkpointing": checkpointing, "tokens_per_s_each": rate, **figures, "step_s": seconds, **peak_memory()},
        )
        del step
        release()
        return rate

    def sequence(self) -> None:
        """Work for each second, by what attention and all else cost, on one GPU and on each of all."""
        config = configuration("4B")
        backend = LocalBackend(base_of(config), TrainingConfig(), self.group)
        backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
        alone, together = (text_datum("m", tokens) for tokens in batch_of(self.sequences))
        numbers = count()

        def all_step() -> None:
            backend.run_together(next(numbers), together, backward=True)
            backend.clear_gradients("m")

        def one_step() -> None:
            outcome = backend.run_pass([alone], backward=True)
            if outcome.failures:
                raise RuntimeError(f"out of memory or worse: {outcome.failures}")
            backend.clear_gradients("m")

        rates = {}
        shortest, longest = self.sequences
        for label, step, length, workers in (
            ("one", one_step, shortest, 1),
            ("all", all_step, longest, self.group.count),
        ):
            release()
            seconds = self.seconds(step, together=workers > 1, warm=1, calls=self.long_calls)
            if self.is_first:
                flops = length / seconds / workers * flops_per_token(config, [length], False)
                rates[label] = flops
                figures = {
                    "tokens": length,
                    "tokens_per_s_each": length / seconds / workers,
                    "tflops_each": flops / 1e12,
                }
                self.say(f"sequence_{label}", figures | {"step_s": seconds} | peak_memory())
        if self.is_first:
            figure("sequence_parallel", rates["all"] / rates["one"], "at least 0.7 of one GPU, attention counted")

    def large(self) -> None:
        """The same on a large hybrid model, which fills most of a card."""
        self.training("large", "Qwen3.6-27B", RANK, "at least 3.7 of 4, 1.85 of 2", sequences=2)

    def experts(self) -> None:
        """A mixture of experts, whose gradients are 1.8 GB."""
        self.training("experts", "30B-A3B", RANK, "at least 1.9 of 2", sequences=16)

    def full(self) -> None:
        """All weights over replicas."""
        self.training("full", "1.7B", 0, "said")

    def full8b(self) -> None:
        """The same on a model whose weights, gradients and moments fill a large card."""
        share = self.training("full8b", "8B", 0, "said", sequences=8, full_state="compact")
        if self.is_first and share:
            figure("full8b_matmul_share", share, "at least 0.45")

    def sharded8b(self) -> None:
        """The same in float32, of which each GPU keeps its part."""
        config = configuration("8B")
        base = base_of(config)
        shard(base, self.group)
        release()
        backend = ShardedBackend(base, TrainingConfig(), self.group)
        backend.create_model("m", LoraShape(0, seed=0))
        lengths = LENGTHS[:1] * 8
        work = [text_datum("m", tokens) for tokens in batch_of(lengths)]
        seconds = self.seconds(partial(train, backend, [work], ["m"]), together=True)
        if self.is_first:
            rate = sum(lengths) / seconds
            share = flops_per_token(config, lengths, True) * rate / (self.matmul * 1e12) if self.matmul else 0.0
            self.keep("sharded8b", rate)
            self.say(
                "sharded8b", {"tokens_per_s_each": rate, "matmul_share": share, "step_s": seconds, **peak_memory()}
            )
            if share:
                figure("sharded8b_matmul_share", share, "at least 0.45 on 4; bare FSDP2 0.36")

    def save(self) -> None:
        """One worker copies the model. What comes after is not measured: the copy is written while training goes on."""
        base = base_of(configuration("8B"))
        base.computed_fingerprint = Future()  # there are no files of weights to compute it of
        base.computed_fingerprint.set_result("")
        backend = LocalBackend(base, TrainingConfig(), self.group)
        backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
        train(backend, [[text_datum("m", tokens) for tokens in batch_of(LENGTHS[:1])]], ["m"])
        seconds = self.seconds(partial(backend.copy_state, "m", optimizer=True), together=False)
        if self.is_first:
            figure("save_pause_s", seconds, "at most 0.2 s")

    def sampling(self) -> None:
        """Replicas of the sampler do not speak with each other."""
        base = base_of(configuration("1.7B"))
        sampler, requests = sampler_of(base), Requests()
        found = {}
        share = ROWS // self.group.count
        for name, rows, together in (("one", ROWS, False), ("all", ROWS, True), ("sharded", share, True)):
            load = Load(name, rows)
            if together or self.is_first:
                sample_all(sampler, requests, load, min(64, ANSWER), None)
            self.meet()
            started = time.perf_counter()
            if together or self.is_first:
                sample_all(sampler, requests, load, ANSWER, None)
            self.meet()  # the slowest counts
            seconds = time.perf_counter() - started
            found[name] = (self.group.count if together else 1) * rows * ANSWER / seconds
            self.say(f"sampling_{name}", {"rows_each": rows, "tokens_per_s": found[name], "seconds": seconds})
        if self.is_first:
            figure("sampling_scaling", found["all"] / found["one"], "at least 3.6 of 4, 1.8 of 2")
            figure("sampling_same_rows", found["sharded"] / found["one"], "said")

    def publish(self) -> None:
        """Every worker takes its own snapshot: nothing travels."""
        base = base_of(configuration("8B"))
        sampler, requests = sampler_of(base), Requests()
        backend = LocalBackend(base, TrainingConfig(), self.group)
        backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
        train(backend, [[text_datum("m", tokens) for tokens in batch_of(LENGTHS[:1])]], ["m"])
        times = []
        for number in range(8):
            self.meet()
            started = time.perf_counter()
            weights = backend.snapshot("m", WeightsRef("bench", str(number), str(number)))
            sampler.publish(weights)
            requests.add(sampler, min(16, PROMPT), 1, weights)
            while sampler.has_work:
                stepped(sampler)
            self.meet()
            times.append(time.perf_counter() - started)
        self.say("publish", {"ms": 1000 * statistics.median(times[2:]), "slowest_ms": 1000 * max(times[2:])})
        if self.is_first:
            figure("publish_replicas_s", statistics.median(times[2:]), "at most 0.2 s")


def reinforcement_learning(count: int, budget_s: float) -> None:
    """Through a server, whose workers are processes of its own."""
    one = isolated("rl_1", served, budget_s)
    many = isolated(f"rl_{count}", partial(served, count, [Batch(), Batch(count * LOAD.rows)]), budget_s)
    figure("rl_step_scaling", ratio(one, many, "step_s"), "at least 1.8 of 2")
    if one and many:
        figure("rl_step_scaling_same_rows_each", count * one["step_s"] / many["step_s_1"], "said")


def reinforcement_learning_in_groups(count: int, budget_s: float) -> None:
    """The same with many samples of each prompt."""
    one, many = (
        isolated(f"rl_groups_{workers}", partial(served, workers, [GROUPS]), budget_s) for workers in (1, count)
    )
    figure("rl_groups_step_scaling", ratio(one, many, "step_s"), "at least 1.8 of 2")


SERVED = {"rl": reinforcement_learning, "rl_groups": reinforcement_learning_in_groups}
"""Parts that start servers."""


def compute(place: Place, asked: argparse.Namespace) -> None:
    """One process. It notes in a file which part it is at."""
    write_to(asked.output)
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder = Path(place.meeting.removeprefix("file://")).parent
    measured = Measured(ProcessGroup(place, device), asked.sequences, asked.long_calls, folder)
    for part in asked.parts:
        _file_of(folder, place.rank).write_text(part)
        try:
            getattr(measured, part)()
            release()
            measured.meet()
        except WorkersLostError:  # another one says why
            os._exit(1)
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait for this process
            traceback.print_exc(limit=-3, file=sys.stdout)
            say(case=part, rank=place.rank, failed=f"{type(error).__name__}: {error}".partition("\n")[0])
            os._exit(1)  # NCCL would wait for the others, which do not come
    measured.group.close()


def _file_of(folder: Path, rank: int) -> Path:
    """Where a process says which part it is at."""
    return folder / f"rank{rank}"


def main() -> None:
    """Start a process for each GPU, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="how many GPUs")
    usual = ",".join(part for part in PARTS if part not in LARGER)
    parser.add_argument("--parts", default=usual, help=f"what to measure, with commas between; of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="a file that gets the lines too, behind what it holds")
    parser.add_argument(
        "--limit", type=float, default=400.0, help="most seconds of each part that starts no server, building included"
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, help="most seconds of each side of a part that starts servers"
    )
    parser.add_argument(
        "--sequences",
        default=",".join(map(str, SEQUENCES)),
        help="tokens of the sequence of one GPU, and of that of all",
    )
    parser.add_argument(
        "--long-calls", type=int, default=2, help="measured steps of each of these sequences, after one that is not"
    )
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.parts = asked.parts.split(",")
    if unknown := [part for part in asked.parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    asked.sequences = [int(tokens) for tokens in asked.sequences.split(",")]
    if len(asked.sequences) != 2:
        parser.error("--sequences takes two numbers of tokens, with a comma between")
    if asked.rank >= 0:
        compute(Place(asked.rank, asked.count, asked.meeting), asked)
        return
    begin_here("workers", asked.output)
    in_groups = [part for part in asked.parts if part not in SERVED]
    failed = run_together(in_groups, asked)
    for part, measure in SERVED.items():
        if part in asked.parts:
            measure(asked.count, asked.budget)
    sys.exit(1 if failed else 0)


def run_together(parts: Sequence[str], asked: argparse.Namespace) -> bool:
    """Measure the parts; whether one failed."""
    left, failed = list(parts), False
    with tempfile.TemporaryDirectory() as folder:
        while left:
            broken = attempt(left, asked, Path(folder))
            if broken is None:
                break
            failed = True
            left = left[left.index(broken) + 1 :]
    return failed


def attempt(parts: Sequence[str], asked: argparse.Namespace, folder: Path) -> str | None:
    """Measure the parts in a process for each GPU. Returns the part that failed or took too long, None if none did."""
    command = [sys.executable, "-m", "benchmarks.gpu.workers", "--count", str(asked.count), "--parts", ",".join(parts)]
    command += ["--meeting", f"file://{folder}/store{len(parts)}", "--long-calls", str(asked.long_calls)]
    command += [
        "--sequences",
        ",".join(map(str, asked.sequences)),
        *(["--output", str(asked.output)] if asked.output else []),
    ]
    files = [_file_of(folder, rank) for rank in range(asked.count)]
    for file in files:
        file.write_text("")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(asked.count):
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)}
            processes.append(subprocess.Popen([*command, "--rank", str(rank)], env=environment, process_group=0))
        return watch(processes, files, parts, asked.limit)
    finally:
        for process in processes:
            # What it holds on the device goes with it, and so do the compilers that it has started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def watch(
    processes: "Sequence[subprocess.Popen[bytes]]", files: Sequence[Path], parts: Sequence[str], limit_s: float
) -> str | None:
    """As `attempt`, of processes that run. `files` say which part each is at."""
    began, last = time.monotonic(), ""
    while True:
        codes = [process.poll() for process in processes]
        at = [file.read_text() for file in files]
        if all(code == 0 for code in codes):
            return None
        ended = next((rank for rank, code in enumerate(codes) if code), None)
        if ended is not None:
            if codes[ended] != 1:
                say(case=at[ended], rank=ended, failed=f"its process ended with {codes[ended]}")
            return at[ended] or _not_begun(parts)
        if at[0] != last:
            began, last = time.monotonic(), at[0]
        if time.monotonic() - began > (limit_s if last else BEGIN_S):
            if last:
                say(case=last, failed=f"not done after {limit_s:.0f} s")
            return last or _not_begun(parts)
        time.sleep(0.1)


def _not_begun(parts: Sequence[str]) -> str:
    """The last part: where the processes do not even meet, none can be measured."""
    say(case="workers", failed="the processes did not begin")
    return parts[-1]


if __name__ == "__main__":
    main()
