"""A user's day on one GPU: waiting times and throughput through `tinsmith serve` with defaults and the real SDK.

Published shapes with random weights in bfloat16; their files lie in memory. Each part starts a server with an empty
compile cache, does its work, and starts the same server once more. Parts:

- hybrid    Qwen3.5-4B: steps of 8×1,024 tokens, a batch of chats, one sequence of 65,536, sampling 64 × (128 + 512),
            and RL steps, 16 prompts of 16 samples (256 + 512)
- dense     Qwen3-4B: steps of 8×1,024 and 4×512; four tenants of ranks 8 to 64, against one batch of their tokens
- images    Qwen3-VL-4B: sampling 32 × 4 with an image in every prompt
- large     Qwen3-8B: steps of 2×4,096 and of 8×1,024

Each work is done several times: `first_s` is what the first one took, `median_s` the median of those behind it. A start
is the time from the launch until healthz says ready.

    python -m benchmarks.gpu.user_day --parts hybrid --output benchmarks/results/user-day-h100.txt
    TINY=1 python -m benchmarks.gpu.user_day
"""

import io
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, isolated_series, ratio, release
from benchmarks.gpu.rl_step import aligned
from benchmarks.gpu.sampling import SHARED_MEMORY
from benchmarks.gpu.shapes import configuration, network_of, write_surroundings
from benchmarks.gpu.training import chat_lengths
from benchmarks.servers import API_KEY, random_datums
from tests.running import Server, serving

SHAPES = {"hybrid": "Qwen3.5-4B", "dense": "4B", "images": "VL-4B", "large": "8B"}
ROWS, LENGTH = (4, 32) if TINY else (8, 1024)
SMALL = [16 if TINY else 512] * 4
LONG = 128 if TINY else 65536
ASKED = (4, 8, 8) if TINY else (64, 128, 512)
"""Requests, tokens of a prompt, tokens of an answer."""
RL = (2, 2, 8, 8) if TINY else (16, 16, 256, 512)
"""Prompts, samples of each, tokens of a prompt, tokens of an answer."""
IMAGES = (2, 2, 32, 8) if TINY else (32, 4, 512, 64)
"""Prompts, samples of each, pixels of a side, tokens of an answer."""
TENANTS = (8, 16, 32, 64)

Cases = Iterator[tuple[str, Figures]]


class Day:
    """A running server, and what is done with it."""

    def __init__(self, server: Server, service: tinker.ServiceClient) -> None:
        self.server = server
        self.service = service
        self.generator = np.random.default_rng(0)

    def model(self, rank: int = 32) -> tinker.TrainingClient:
        """A new LoRA model."""
        return self.service.create_lora_training_client("bench", rank=rank, train_unembed=False).result()

    def prompt(self, length: int) -> types.ModelInput:
        """Random text."""
        return types.ModelInput.from_ints(self.generator.integers(0, 1500, length).tolist())


def repeated(work: Callable[[], object], tokens: int, times: int = 4) -> Figures:
    """Do the work so often: seconds of the first time, the median of the others, and their tokens per second."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    later = taken[1:]
    median = statistics.median(later)
    return {"tokens_per_s": tokens / median, "first_s": taken[0], "median_s": median, "slowest_s": max(later)}


def step(model: tinker.TrainingClient, data: list[types.Datum], loss: Any = "cross_entropy") -> None:
    """Wait for a training step, whose requests are sent one behind the other."""
    futures = model.forward_backward(data, loss), model.optim_step(types.AdamParams(learning_rate=1e-4))
    for future in futures:
        future.result()


def training(day: Day, name: str, lengths: Sequence[int], times: int = 4) -> Cases:
    """Steps of a new model on sequences of these lengths."""
    model, data = day.model(), random_datums(lengths)
    yield name, repeated(lambda: step(model, data), sum(lengths), times)


def hybrid(day: Day) -> Cases:
    """What today's default model is used for."""
    yield from training(day, "8x1024", [LENGTH] * ROWS)
    yield from training(day, "chat", chat_lengths(), times=3)
    yield from training(day, "long", [LONG], times=3)
    yield "sampling", sampling(day)
    yield "rl", reinforcement(day)


def sampling(day: Day) -> Figures:
    """Requests at once, of the base model."""
    rows, prompt, answer = ASKED
    client = day.service.create_sampling_client(base_model="bench").result()
    params = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])

    def ask() -> None:
        for future in [client.sample(day.prompt(prompt), 1, params) for _ in range(rows)]:
            future.result()

    return repeated(ask, rows * answer)


def reinforcement(day: Day) -> Figures:
    """Steps of reinforcement learning: publish, sample, train on what was sampled.

    Medians of the phases of all steps but the first.
    """
    prompts, samples, prompt, answer = RL
    model = day.model()
    params = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])
    sampled_s, trained_s = [], []

    def iteration() -> None:
        client = model.save_weights_and_get_sampling_client().result()
        asked = [day.prompt(prompt) for _ in range(prompts)]
        began = time.perf_counter()
        answers = [future.result() for future in [client.sample(text, samples, params) for text in asked]]
        sampled_s.append(time.perf_counter() - began)
        data = [
            _answered(text, sequence)
            for text, reply in zip(asked, answers, strict=True)
            for sequence in reply.sequences
        ]
        began = time.perf_counter()
        step(model, data, "importance_sampling")
        trained_s.append(time.perf_counter() - began)

    whole = repeated(iteration, prompts * samples * (prompt + answer), times=3)
    rate = prompts * samples * answer / statistics.median(sampled_s[1:])
    return whole | {
        "sampling_s": statistics.median(sampled_s[1:]),
        "training_s": statistics.median(trained_s[1:]),
        "sampled_per_s": rate,
    }


def _answered(prompt: types.ModelInput, sequence: types.SampledSequence) -> types.Datum:
    tokens = np.array([*prompt.to_ints(), *sequence.tokens], dtype=np.int64)
    reward = float(np.mean(np.array(sequence.tokens) % 2)) - 0.5
    inputs = {
        "target_tokens": types.TensorData.from_numpy(tokens[1:]),
        "logprobs": types.TensorData.from_numpy(aligned(prompt.length, sequence.logprobs or [])),
        "advantages": types.TensorData.from_numpy(aligned(prompt.length, [reward] * len(sequence.tokens))),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def dense(day: Day) -> Cases:
    """Full batches, small ones, and small ones of four tenants at once."""
    yield from training(day, "8x1024", [LENGTH] * ROWS)
    yield from training(day, "4x512", SMALL, times=20)
    yield from training(day, "16x512", SMALL * len(TENANTS), times=8)
    models, data = [day.model(rank) for rank in TENANTS], random_datums(SMALL)

    def together() -> None:
        adam = types.AdamParams(learning_rate=1e-4)
        futures = [(model.forward_backward(data, "cross_entropy"), model.optim_step(adam)) for model in models]
        for future in (future for pair in futures for future in pair):
            future.result()

    yield "tenants", repeated(together, sum(SMALL) * len(TENANTS), times=8)


def images(day: Day) -> Cases:
    """Prompts with a new image each; the server sees every image once."""
    count, samples, side, answer = IMAGES
    client = day.service.create_sampling_client(base_model="bench").result()
    params = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])

    def ask() -> None:
        for future in [client.sample(_about_a_image(day, side), samples, params) for _ in range(count)]:
            future.result()

    yield "sampling", repeated(ask, count * samples * answer, times=3)


def _about_a_image(day: Day, side: int) -> types.ModelInput:
    file = io.BytesIO()
    Image.fromarray(day.generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "JPEG")
    text = types.EncodedTextChunk(tokens=day.generator.integers(0, 1500, 64).tolist())
    return types.ModelInput(chunks=[types.ImageChunk(data=file.getvalue(), format="jpeg"), text])


def large(day: Day) -> Cases:
    """Long and short rows of a model that fills a card."""
    yield from training(day, "2x4096", [LENGTH * 4] * 2)
    yield from training(day, "8x1024", [LENGTH] * ROWS)


PARTS: dict[str, Callable[[Day], Cases]] = {"hybrid": hybrid, "dense": dense, "images": images, "large": large}


def part(name: str) -> Cases:
    """Write the model, start its server, do the work, and start the server again."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        config = configuration(SHAPES[name])
        network = network_of(config)
        model = write_surroundings(config, folder / "model")
        network.save_pretrained(model)
        del network
        release()
        patch.setenv("TRITON_CACHE_DIR", str(folder / "kernels"))
        with started(folder, model) as (server, ready_s):
            yield "start, nothing compiled", {"ready_s": ready_s, "self_check_s": _self_check_s(server)}
            with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
                yield from PARTS[name](Day(server, service))
            log = server.log.read_text()
            yield "log", {"out_of_memory": log.count("out of memory"), "warnings": log.count(" WARNING ")}
        with started(folder, model) as (server, ready_s):
            yield "start, compiled before", {"ready_s": ready_s, "self_check_s": _self_check_s(server)}


@contextmanager
def started(folder: Path, model: Path) -> Iterator[tuple[Server, float]]:
    """A server with default settings, and the seconds until it was ready."""
    began = time.perf_counter()
    with serving(folder, "--base-model", f"bench={model}", "--device", DEVICE, "--dtype", "bfloat16") as server:
        server.wait_for_health()
        yield server, time.perf_counter() - began


def _self_check_s(server: Server) -> float:
    found = re.search(r"passes its self-check on .*, ([0-9.]+) s", server.log.read_text())
    return float(found[1]) if found else 0.0


WANTED = {
    "hybrid": {"8x1024": 18000, "long": 9000, "sampling": 10500},
    "large": {"2x4096": 15600},
}
"""Tokens per second that are aimed at on one H100."""


def main() -> None:
    """Do what was asked for."""
    asked = begin(__doc__, list(PARTS))
    for name in asked.parts:
        found = isolated_series(name, partial(part, name), asked.budget)
        for case, rate in WANTED.get(name, {}).items():
            figure(f"{name}_{case}", found.get(case, {}).get("tokens_per_s"), f"at least {rate}")
        figure(f"{name}_chat_of_batch", ratio(found.get("chat", {}), found.get("8x1024", {})), "at least 0.95")
        figure(f"{name}_tenants_of_batch", ratio(found.get("tenants", {}), found.get("16x512", {})), "at least 0.95")
        figure(f"{name}_ready_s", found.get("start, nothing compiled", {}).get("ready_s"), "at most 45")
        figure(f"{name}_ready_again_s", found.get("start, compiled before", {}).get("ready_s"), "at most 12")


if __name__ == "__main__":
    main()
