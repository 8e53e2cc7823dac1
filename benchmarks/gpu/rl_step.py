"""How a step of reinforcement learning on one GPU divides into sampling, training, publishing and the rest.

Qwen3-4B's shape with random weights, LoRA of rank 32, bfloat16: 64 requests of 128 tokens that get 256 each, one step
of `importance_sampling` on all of them, the new adapter published. Parts:

- local   by Backend and sampler in one process
- experts  as `local`, Qwen3-30B-A3B, 256 requests of 256 tokens that get 512 each
- served  through SDK and server, as the client sees it: the rest is its own work; `over_local` is what the server adds

    python -m benchmarks.gpu.rl_step --output benchmarks/results/rl_step.txt
    TINY=1 python -m benchmarks.gpu.rl_step
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, finish, isolated, peak_memory, ratio, release
from benchmarks.gpu.sampling import CACHE_GIB, SHARED_MEMORY, Load, Requests, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, network_of, write_surroundings
from benchmarks.gpu.training import RANK, backend_of, filled, train
from tinsmith.protocol.shapes import WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.sampler import SampleResult
from tinsmith.training.backend import DatumWork
from tinsmith.training.losses import LOSSES

PARTS = ("local", "experts", "served")
LOAD = Load("rl", 4 if TINY else 64, prompt=16 if TINY else 128, answer=24 if TINY else 256)
EXPERTS = Load("rl", 8 if TINY else 256, prompt=16 if TINY else 256, answer=24 if TINY else 512)
STEPS = 4


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.began = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; its phases lie inside."""
        self.steps.append({})
        began = time.perf_counter()
        yield
        self.steps[-1]["step"] = time.perf_counter() - began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase of the step; the device is waited for at its end."""
        began = time.perf_counter()
        yield
        finish()
        self.steps[-1][name] = self.steps[-1].get(name, 0.0) + time.perf_counter() - began

    def figures(self) -> Figures:
        """Median seconds of a step, and the shares of its phases, over all steps but the first two, which compile."""
        later = self.steps[2:]
        step_s = statistics.median(step["step"] for step in later)
        total = sum(step["step"] for step in later)
        shares = {
            f"{name}_share": sum(step[name] for step in later) / total
            for name in ("sampling", "training", "publishing")
        }
        return {
            "step_s": step_s,
            **shares,
            "rest_share": 1 - sum(shares.values()),
            "first_step_s": self.steps[0]["step"],
        }


def aligned(prompt: int, values: Sequence[float]) -> NDArray[np.float32]:
    """Numbers of an answer's tokens [answer], where its datum predicts them; 0 for what the prompt's tokens predict."""
    return np.concatenate([np.zeros(prompt - 1), values]).astype(np.float32)


def local(shape: str, load: Load) -> Figures:
    """Backend and sampler in this process."""
    config = configuration(shape)
    network = network_of(config)
    release()
    backend = backend_of(base_of(config, network), {"m": RANK})
    sampler, requests, clock = sampler_of(backend.base), Requests(), Clock()
    for number in range(STEPS + 2):
        with clock.step():
            with clock.phase("publishing"):
                weights = backend.snapshot("m", WeightsRef("bench", str(number), str(number)))
                sampler.publish(weights)
            results: list[SampleResult] = []
            with clock.phase("sampling"):
                prompts = {
                    requests.add(sampler, load.prompt, load.answer, weights): requests.newest for _ in range(load.rows)
                }
                while sampler.has_work:
                    results += [event for event in stepped(sampler) if isinstance(event, SampleResult)]
            work = [_datum(prompts[result.request_id], result) for result in results]
            with clock.phase("training"):
                train(backend, filled(work, backend.passes.tokens_per_pass), ["m"])
    return clock.figures() | peak_memory()


def _datum(prompt: NDArray[np.int32], result: SampleResult) -> DatumWork:
    sampled = result.sequences[0]
    tokens = np.concatenate([prompt, sampled.tokens]).astype(np.int32)
    inputs, targets = tokens[:-1], tokens[1:].astype(np.int64)
    reward = float(np.mean(np.array(sampled.tokens) % 2)) - 0.5
    numbers = {
        "logprobs": aligned(len(prompt), sampled.logprobs),
        "advantages": aligned(len(prompt), [reward] * len(sampled.tokens)),
    }
    rendered = RenderedInput(inputs, (), (), torch.arange(len(inputs)).unsqueeze(0))
    return DatumWork("m", rendered, targets, LOSSES["importance_sampling"], numbers)


@dataclass(frozen=True)
class Batch:
    """What one step samples and trains on."""

    prompts: int = LOAD.rows
    samples: int = 1
    """Of each prompt, in one request."""


def served(workers: int = 1, batches: Sequence[Batch] = (Batch(),)) -> Figures:
    """The same through SDK and server with that many workers: the first batch's figures, `step_s_N` of the others."""
    import tinker
    from tinker import types

    from benchmarks.servers import API_KEY
    from tests.running import serving

    generator, clocks = np.random.default_rng(0), [Clock() for _ in batches]
    params = types.SamplingParams(max_tokens=LOAD.answer, temperature=1.0, stop=[])
    adam = types.AdamParams(learning_rate=1e-4)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        config = configuration("4B")
        network = network_of(config)
        model = write_surroundings(config, Path(folder) / "model")
        network.save_pretrained(model)
        del network
        release()
        options = [
            "--base-model",
            f"bench={model}",
            "--device",
            DEVICE,
            "--dtype",
            "bfloat16",
            "--kv-cache-gib",
            str(CACHE_GIB),
        ]
        with serving(Path(folder), *options, "--workers", str(workers)) as server:
            server.wait_for_health()
            with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
                trainer = service.create_lora_training_client("bench", rank=RANK, train_unembed=False).result()
                for clock, batch in (
                    (clock, batch) for clock, batch in zip(clocks, batches, strict=True) for _ in range(STEPS + 2)
                ):
                    with clock.step():
                        with clock.phase("publishing"):
                            client = trainer.save_weights_and_get_sampling_client().result()
                        prompts = [
                            generator.integers(0, 1500, LOAD.prompt).astype(np.int32) for _ in range(batch.prompts)
                        ]
                        asked = [types.ModelInput.from_ints(prompt.tolist()) for prompt in prompts]
                        with clock.phase("sampling"):
                            answers = [
                                future.result()
                                for future in [client.sample(prompt, batch.samples, params) for prompt in asked]
                            ]
                        pairs = zip(prompts, answers, strict=True)
                        data = [_sdk_datum(prompt, sampled) for prompt, answer in pairs for sampled in answer.sequences]
                        with clock.phase("training"):
                            futures = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(adam)
                            for future in futures:
                                future.result()
    others = {f"step_s_{number}": clock.figures()["step_s"] for number, clock in enumerate(clocks) if number}
    return clocks[0].figures() | others


def _sdk_datum(prompt: NDArray[np.int32], sampled: Any) -> Any:
    from tinker import types

    tokens = np.concatenate([prompt, sampled.tokens]).astype(np.int64)
    reward = float(np.mean(np.array(sampled.tokens) % 2)) - 0.5
    inputs = {
        "target_tokens": types.TensorData.from_numpy(tokens[1:]),
        "logprobs": types.TensorData.from_numpy(aligned(len(prompt), sampled.logprobs)),
        "advantages": types.TensorData.from_numpy(aligned(len(prompt), [reward] * len(sampled.tokens))),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def main() -> None:
    """Measure what was asked for."""
    asked = begin(__doc__, PARTS)
    found: dict[str, Figures] = {}
    actions: dict[str, Callable[[], Figures]] = {
        "local": partial(local, "4B", LOAD),
        "experts": partial(local, "30B-A3B", EXPERTS),
        "served": served,
    }
    for part, action in actions.items():
        if part in asked.parts:
            found[part] = isolated(part, action, asked.budget)
            figure(f"rl_step_rest_{part}", found[part].get("rest_share"), "at most 0.05")
    figure("rl_step_over_local", ratio(found.get("served", {}), found.get("local", {}), "step_s"), "")


if __name__ == "__main__":
    main()
