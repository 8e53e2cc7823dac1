"""Several GPUs of one host, each with a worker's base model, trainer and sampler: what two or more do in the time of one.

Every process has one GPU and meets the others as workers do. First the process of the first GPU computes alone, while the others wait, then
all compute at once. Parts:

- lora      Qwen3-8B, LoRA of rank 32, 4 sequences of 1,024 tokens on each GPU: one step with its sum of gradients
- full      Qwen3-1.7B, all weights, 4 sequences of 1,024 tokens on each GPU
- sampling  Qwen3-1.7B, 256 requests of 128 tokens on each GPU, which get 512 tokens each; and 256 in all
- publish   Qwen3-8B, LoRA of rank 32: a snapshot on every GPU, until a token of it is sampled on all of them

    python -m benchmarks.gpu.workers --count 2 --output benchmarks/results/workers.txt
    TINY=1 python -m benchmarks.gpu.workers --count 2
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin_here, card, figure, finish, peak_memory, release, say
from benchmarks.gpu.sampling import ANSWER, PROMPT, Load, Requests, sample_all, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, flops_per_token
from benchmarks.gpu.training import batch_of, text_datum, train
from tinsmith.config import TrainingConfig
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.training.backend import LocalBackend

PARTS = ("lora", "full", "sampling", "publish")
LENGTHS = [32] * 4 if TINY else [1024] * 4
ROWS = 8 if TINY else 256
RANK = 4 if TINY else 32
WARM, CALLS = (2, 4) if TINY else (3, 12)


class Measured:
    """One process of the benchmark. The first says what all have done."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.is_first = group.place.rank == 0
        self.matmul = card().get("matmul_tflops", 0.0) if self.is_first else 0.0
        self.meet()

    def meet(self) -> None:
        """Wait for the others."""
        finish()
        self.group.gather(0)

    def seconds(self, step: Callable[[], object], together: bool) -> float:
        """The median of a step. All must take part in what is done together; what is not, the first does alone."""
        self.meet()
        times = []
        if together or self.is_first:
            for _ in range(WARM + CALLS):
                finish()
                started = time.perf_counter()
                step()
                finish()
                times.append(time.perf_counter() - started)
        self.meet()
        return statistics.median(times[WARM:]) if times else 0.0

    def say(self, name: str, figures: Figures) -> None:
        if self.is_first:
            say(case=name, **figures)

    def training(self, name: str, shape: str, rank: int, wanted: str) -> None:
        """One GPU against all, the same tokens on each."""
        config = configuration(shape)
        base = base_of(config)
        work = [text_datum("m", tokens) for tokens in batch_of(LENGTHS)]
        rates = {}
        for label, group in (("one", None), ("all", self.group)):
            backend = LocalBackend(base, TrainingConfig(), group)
            backend.create_model("m", LoraShape(rank, seed=0, train_unembed=False))
            seconds = self.seconds(partial(train, backend, [work], ["m"]), together=group is not None)
            if self.is_first:
                rates[label] = sum(LENGTHS) / seconds
                share = flops_per_token(config, LENGTHS, rank == 0) * rates[label] / (self.matmul * 1e12) if self.matmul else 0.0
                self.say(f"{name}_{label}", {"tokens_per_s_each": rates[label], "matmul_share": share, "step_s": seconds, **peak_memory()})
            del backend
            release()
        if self.is_first:
            figure(f"{name}_scaling", self.group.count * rates["all"] / rates["one"], wanted)

    def lora(self) -> None:
        """LoRA over replicas."""
        self.training("lora", "8B", RANK, "at least 3.85 of 4, 1.92 of 2")

    def full(self) -> None:
        """All weights over replicas."""
        self.training("full", "1.7B", 0, "said")

    def sampling(self) -> None:
        """Replicas of the sampler do not speak with each other."""
        base = base_of(configuration("1.7B"))
        sampler, requests = sampler_of(base), Requests()
        found = {}
        share = ROWS // self.group.count
        for name, rows, together in (("one", ROWS, False), ("all", ROWS, True), ("divided", share, True)):
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
            figure("sampling_same_rows", found["divided"] / found["one"], "said")

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


def compute(place: Place, parts: list[str], output: Path | None) -> None:
    """One process."""
    if place.rank == 0:
        begin_here("workers", output)
    device = torch.device(DEVICE)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    measured = Measured(ProcessGroup(place, device))
    for part in parts:
        getattr(measured, part)()
        release()
        measured.meet()
    measured.group.close()


def main() -> None:
    """Start a process for each GPU, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="how many GPUs")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, with commas between")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    if asked.rank >= 0:
        compute(Place(asked.rank, asked.count, asked.meeting), parts, asked.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        command = [sys.executable, "-m", "benchmarks.gpu.workers", *sys.argv[1:], "--meeting", meeting]
        processes = []
        for rank in range(asked.count):
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)}
            processes.append(subprocess.Popen([*command, "--rank", str(rank)], env=environment))
        failed = [process for process in processes if process.wait() != 0]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
