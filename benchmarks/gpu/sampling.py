"""Sampling on one GPU by the local sampler, and by vLLM: tokens per second, delays, how long publishing takes.

Published shapes with random weights, bfloat16, temperature 1, with logprobs, each side through its own Python API.
Tokens per second count the sampled tokens, from the first request to the last answer, prompts included. Parts:

- 1.7B     Qwen3-1.7B, 64 and 256 requests of 128 tokens that get 512, half with an adapter of rank 32; and one alone
- 4B       Qwen3-4B, one request alone
- hybrid   Qwen3.5-4B, 64 and 256 requests of 128 tokens that get 512 each
- experts  Qwen3-30B-A3B, 64 requests of 128 tokens that get 512 each, none with an adapter and half of them
- latency  Qwen3-1.7B, 64 requests running: time to the first token of a prompt of 2,048, and between tokens of the 64
- publish  Qwen3-1.7B: from a trained adapter of rank 32 to the first token sampled with it
- publish_experts  the same of Qwen3.6-35B-A3B
- served   Qwen3-1.7B, 64 requests as above and publishing, through the SDK and the server
- deterministic  the 64 of the first part with the option of that name, against those without

    python -m benchmarks.gpu.sampling --parts 1.7B,latency --output benchmarks/results/sampling.txt
    TINY=1 python -m benchmarks.gpu.sampling --sides ours

vLLM runs in its own environment: TINSMITH_TEST_VLLM_PYTHON is its Python, TINSMITH_TEST_VLLM_PATH its PYTHONPATH.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.measuring import (
    DEVICE,
    TINY,
    Figures,
    begin,
    figure,
    finish,
    isolated,
    isolated_series,
    peak_memory,
    ratio,
    release,
    say,
)
from benchmarks.gpu.shapes import base_of, configuration, network_of, write_surroundings
from tinsmith.config import SamplingConfig, TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import AdamSettings, LoraShape, WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, TokensSampled
from tinsmith.training.backend import LocalBackend
from tinsmith.training.peft_format import write_peft
from tinsmith.wire.chunks import TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

PARTS = ("1.7B", "4B", "hybrid", "experts", "latency", "publish", "publish_experts", "served", "deterministic")
SIDES = ("ours", "vllm")
RANK = 32
PROMPT, ANSWER = (16, 24) if TINY else (128, 512)
LONG_PROMPT = 64 if TINY else 2048
CACHE_GIB = 0.05 if TINY else 32.0
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class Load:
    """Requests that come at once."""

    name: str
    rows: int
    with_adapter: int = 0
    """How many of them sample with the adapter."""
    prompt: int = PROMPT
    answer: int = ANSWER


MANY = [Load("64", 8 if TINY else 64, 4 if TINY else 32), Load("256", 16 if TINY else 256, 8 if TINY else 128)]
ALONE = Load("alone", 1)
HYBRID = [Load("64", 8 if TINY else 64), Load("256", 16 if TINY else 256)]
EXPERTS = [Load("bare", 8 if TINY else 64), MANY[0]]


class Requests:
    """Requests of random tokens that a sampler has not seen."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.numbers = itertools.count()
        self.newest = np.empty(0, dtype=np.int32)
        """The prompt that was added last."""

    def add(
        self, sampler: LocalSampler, prompt: int, answer: int, weights: Weights | None, stream: bool = False
    ) -> str:
        """Add one of `prompt` tokens that gets `answer` tokens; returns its id."""
        self.newest = tokens = self.generator.integers(0, 1500, prompt).astype(np.int32)
        stop = StopRule(eos=False, strings=(), token_ids=())
        params = SamplingParams(max_tokens=answer, temperature=1.0, top_p=1.0, top_k=-1, seed=None, stop=stop)
        number = next(self.numbers)
        request = SampleRequest("bench", number, 1, [TextChunk(tokens)], params, PromptQuestions())
        sampler.add(
            str(number), request, RenderedInput(tokens, (), (), torch.arange(prompt).unsqueeze(0)), weights, stream
        )
        return str(number)


def stepped(
    sampler: LocalSampler, deliver: Callable[[Sequence[SampleEvent]], None] | None = None
) -> Sequence[SampleEvent]:
    """One step. Raises RuntimeError if a sample failed."""
    events = sampler.step(deliver)
    if failed := [event.error for event in events if isinstance(event, SampleFailure)]:
        raise RuntimeError(str(failed[0]))
    return events


def sample_all(sampler: LocalSampler, requests: Requests, load: Load, answer: int, adapter: Adapter | None) -> float:
    """Seconds from the first request to the last answer."""
    finish()
    started = time.perf_counter()
    for row in range(load.rows):
        requests.add(sampler, load.prompt, answer, adapter if row < load.with_adapter else None)
    while sampler.has_work:
        stepped(sampler)
    return time.perf_counter() - started


def rates(load: Load, times: Sequence[float]) -> Figures:
    """Tokens per second of rounds that took so long."""
    tokens = load.rows * load.answer
    return {
        "tokens_per_s": tokens / statistics.median(times),
        "slowest": tokens / max(times),
        "fastest": tokens / min(times),
    }


def sampler_of(base: BaseModel, cache_gib: float = CACHE_GIB) -> LocalSampler:
    """A sampler with room for all loads."""
    return LocalSampler(base, SamplingConfig(kv_cache_gib=cache_gib, max_running=320), TrainingConfig().logits_chunk)


def adapter_of(base: BaseModel) -> Adapter:
    """A frozen adapter whose B is not zero."""
    adapter = new_adapter(LoraShape(RANK, seed=0, train_unembed=False), base.layout, base.device, base.dtype)
    torch.manual_seed(1)
    for pair in adapter.masters.values():
        pair.b.normal_(0.0, 0.02)
    adapter.refresh()
    return adapter.snapshot(WeightsRef("bench", "adapter", "adapter"))


def ours(shape: str, loads: Sequence[Load], deterministic: bool = False) -> Iterator[tuple[str, Figures]]:
    """The local sampler: three rounds of each load after a short one, fewer if slow.

    `deterministic` is the server's option of that name.
    """
    base, sampler, requests = _begun(shape, deterministic)
    adapter = adapter_of(base) if any(load.with_adapter for load in loads) else None
    for load in loads:
        first_s = sample_all(sampler, requests, load, min(64, load.answer), adapter)
        times = [sample_all(sampler, requests, load, load.answer, adapter)]
        while len(times) < 3 and sum(times) < 15:
            times.append(sample_all(sampler, requests, load, load.answer, adapter))
        yield load.name, rates(load, times) | {"first_round_s": first_s} | peak_memory()


def _begun(shape: str, deterministic: bool = False) -> tuple[BaseModel, LocalSampler, Requests]:
    config = configuration(shape)
    network = network_of(config)
    release()
    base = base_of(config, network, deterministic=deterministic)
    return base, sampler_of(base), Requests()


def vllm(shape: str, loads: Sequence[Load]) -> Iterator[tuple[str, Figures]]:
    """The same of vLLM, in a process that it has for itself."""
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = Path(folder) / "model", Path(folder) / "adapter"
        with_adapter = any(load.with_adapter for load in loads)
        _write_for_vllm(shape, model, adapter if with_adapter else None)
        options: dict[str, Any] = {
            "max_model_len": 4096,
            "max_num_seqs": 256,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        if with_adapter:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
        options |= {"enforce_eager": True, "max_model_len": 512} if TINY else {"gpu_memory_utilization": 0.6}
        if shape == "Qwen3.5-4B":
            # FlashInfer's kernels, its default, are in no wheel that the card's machine had
            options |= {"limit_mm_per_prompt": {"image": 0, "video": 0}, "gdn_prefill_backend": "triton"}
        described = [asdict(load) for load in loads]
        job = {
            "model": str(model),
            "adapter": str(adapter) if with_adapter else None,
            "loads": described,
            "options": options,
        }
        own = {
            "PYTHONPATH": os.environ.get("TINSMITH_TEST_VLLM_PATH", ""),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        python = os.environ.get("TINSMITH_TEST_VLLM_PYTHON", sys.executable)
        command = [python, "-m", "benchmarks.gpu.vllm_alone", json.dumps(job)]
        log = Path(tempfile.gettempdir()) / f"vllm-{shape}.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, env=os.environ | own, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            by_name = {load.name: load for load in loads}
            for line in process.stdout or ():
                if line.startswith('{"name"'):
                    told = json.loads(line)
                    times = told["seconds"]
                    yield (
                        told["name"],
                        rates(by_name[told["name"]], times) if told["name"] in by_name else {"load_s": times[0]},
                    )
        if process.returncode:
            raise RuntimeError(
                f"vLLM ended with {process.returncode}: " + " | ".join(log.read_text().splitlines()[-8:])
            )


def _write_for_vllm(shape: str, model: Path, adapter: Path | None) -> None:
    """A directory without weights that vLLM can load, and the adapter as PEFT keeps it."""
    config = configuration(shape)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    if adapter:
        base = base_of(config)
        write_peft(adapter_of(base), base.layout, "bench", adapter)
    if shape == "Qwen3.5-4B":  # vLLM has this language model only inside of the one with images
        from transformers import Qwen3_5Config

        text = config.to_dict()
        config = Qwen3_5Config(text_config=text, tie_word_embeddings=True)
        config.architectures = ["Qwen3_5ForConditionalGeneration"]
    write_surroundings(config, model)


class Delays:
    """When the tokens of running requests come, and the first one of prompts that come beside them."""

    def __init__(self, sampler: LocalSampler, requests: Requests) -> None:
        self.sampler = sampler
        self.requests = requests
        self.last: dict[str, float] = {}
        """When the newest token of a request came."""
        self.gaps: list[float] = []
        """Seconds between two tokens of a request."""

    def step(self) -> set[str]:
        """One step; returns the requests that got tokens."""
        came: set[str] = set()

        def take(events: Sequence[SampleEvent]) -> None:
            now = time.perf_counter()
            for event in events:
                if isinstance(event, TokensSampled):
                    if event.request_id in self.last:
                        self.gaps.append((now - self.last[event.request_id]) / len(event.tokens))
                    self.last[event.request_id] = now
                    came.add(event.request_id)

        take(stepped(self.sampler, take))
        return came

    def first_token(self) -> float:
        """Seconds to the first token of a new long prompt."""
        finish()
        began = time.perf_counter()
        mine = self.requests.add(self.sampler, LONG_PROMPT, 1, None, stream=True)
        while mine not in self.step():
            pass
        return time.perf_counter() - began


def latency() -> Figures:
    """How 64 running requests and a long prompt delay each other; such a prompt comes every 50 tokens of the 64."""
    _, sampler, requests = _begun("1.7B")
    running, prompts, between = (4, 3, 10) if TINY else (64, 12, 50)
    delays = Delays(sampler, requests)
    alone = []
    for _ in range(prompts):
        alone.append(delays.first_token())
        while sampler.has_work:
            delays.step()
    for _ in range(running):
        requests.add(sampler, PROMPT, (prompts + 4) * between * 2, None, stream=True)
    for _ in range(2 * between):
        delays.step()
    delays.gaps.clear()
    beside = []
    for _ in range(prompts):
        beside.append(delays.first_token())
        for _ in range(between):
            delays.step()
    p50, p99 = (1000 * float(np.percentile(delays.gaps, part)) for part in (50, 99))
    return {
        "first_token_alone_ms": 1000 * statistics.median(alone[1:]),
        "first_token_ms": 1000 * statistics.median(beside[1:]),
        "first_token_slowest_ms": 1000 * max(beside[1:]),
        "between_tokens_p50_ms": p50,
        "between_tokens_p99_ms": p99,
    }


def publish(shape: str = "1.7B") -> Figures:
    """From the last optimizer step of an adapter to the first token sampled with it, nothing else running."""
    base, sampler, requests = _begun(shape)
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
    times, copied = [], []
    for number in range(4 if TINY else 12):
        _train_a_little(backend)
        finish()
        began = time.perf_counter()
        weights = backend.snapshot("m", WeightsRef("bench", str(number), str(number)))
        copied.append(1000 * (time.perf_counter() - began))
        sampler.publish(weights)
        requests.add(sampler, 16, 1, weights)
        while sampler.has_work:
            stepped(sampler)
        times.append(1000 * (time.perf_counter() - began))
    return {
        "publish_ms": statistics.median(times[2:]),
        "slowest_ms": max(times[2:]),
        "first_ms": times[0],
        "snapshot_ms": statistics.median(copied[2:]),
    }


def _train_a_little(backend: LocalBackend) -> None:
    from benchmarks.gpu.training import batch_of, text_datum

    if failures := backend.run_pass([text_datum("m", tokens) for tokens in batch_of([64])], backward=True).failures:
        raise RuntimeError(str(failures))
    backend.optim_step("m", AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0))


def served() -> Iterator[tuple[str, Figures]]:
    """The load of 64 through SDK and server, half of it with a trained adapter, and publishing."""
    import tinker
    from tinker import types

    from benchmarks.servers import API_KEY, sdk_datum
    from tests.running import serving

    load = MANY[0]
    generator = np.random.default_rng(0)

    def datums() -> list[types.Datum]:
        return [sdk_datum(generator.integers(0, 1500, 64).astype(np.int32))]

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        config = configuration("1.7B")
        network = network_of(config)
        model = write_surroundings(config, Path(folder) / "model")
        network.save_pretrained(model)
        del network
        release()
        options = (
            "--base-model",
            f"bench={model}",
            "--device",
            DEVICE,
            "--dtype",
            "bfloat16",
            "--kv-cache-gib",
            str(CACHE_GIB),
        )
        began = time.perf_counter()
        with serving(Path(folder), *options, "--max-running", "320", "--workers", "1") as server:
            server.wait_for_health()
            yield "start", {"start_s": time.perf_counter() - began}
            with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
                trainer = service.create_lora_training_client("bench", rank=RANK, train_unembed=False).result()
                step = types.AdamParams(learning_rate=1e-3)
                base = service.create_sampling_client(base_model="bench").result()

                def publish() -> tuple[tinker.SamplingClient, float]:
                    trainer.forward_backward(datums(), "cross_entropy").result()
                    trainer.optim_step(step).result()
                    began = time.perf_counter()
                    client = trainer.save_weights_and_get_sampling_client().result()
                    client.sample(types.ModelInput.from_ints([1] * 16), 1, types.SamplingParams(max_tokens=1)).result()
                    return client, 1000 * (time.perf_counter() - began)

                adapted, _ = publish()

                def round_of(answer: int) -> float:
                    params = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])
                    began = time.perf_counter()
                    futures = []
                    for row in range(load.rows):
                        prompt = types.ModelInput.from_ints(generator.integers(0, 1500, load.prompt).tolist())
                        client = adapted if row < load.with_adapter else base
                        futures.append(client.sample(prompt, num_samples=1, sampling_params=params))
                    if any(len(future.result().sequences[0].tokens) != answer for future in futures):
                        raise RuntimeError(f"an answer does not have {answer} tokens")
                    return time.perf_counter() - began

                round_of(min(64, load.answer))
                yield load.name, rates(load, [round_of(load.answer) for _ in range(3)])
                times = [publish()[1] for _ in range(4 if TINY else 10)]
                yield "publish", {"publish_ms": statistics.median(times[1:]), "slowest_ms": max(times[1:])}


class Script:
    """The command line's choice, and what has been measured."""

    def __init__(self) -> None:
        self.asked = begin(__doc__, PARTS, SIDES)
        self.found: dict[str, Figures] = {}

    def case(self, name: str, side: str, action: Callable[[], Iterator[tuple[str, Figures]]]) -> None:
        """Measure one side of a part, if it was asked for."""
        if side in self.asked.sides:
            for label, figures in isolated_series(f"{name}/{side}", action, self.asked.budget).items():
                self.found[f"{name}/{side}/{label}"] = figures

    def both(self, shape: str, loads: Sequence[Load], wanted: dict[str, str]) -> None:
        """Measure loads on both sides, and print their ratios."""
        self.case(shape, "ours", partial(ours, shape, loads))
        self.case(shape, "vllm", partial(vllm, shape, loads))
        for label, target in wanted.items():
            mine, rival = (self.found.get(f"{shape}/{side}/{label}", {}) for side in SIDES)
            figure(f"sampling_{shape}_{label}", ratio(mine, rival), f"at least {target} times vLLM")

    def experts(self) -> None:
        """Measure a mixture of experts."""
        self.case("30B-A3B", "ours", partial(ours, "30B-A3B", EXPERTS))
        self.case("30B-A3B", "vllm", partial(vllm, "30B-A3B", EXPERTS[:1]))
        bare, adapted, rival = (self.found.get(f"30B-A3B/{name}", {}) for name in ("ours/bare", "ours/64", "vllm/bare"))
        figure("sampling_experts", adapted.get("tokens_per_s"), "at least 3,500 tokens per second on an H200")
        figure("adapters_of_experts", ratio(adapted, bare), "at least 0.8 of the same without adapters")
        figure("sampling_experts_bare", ratio(bare, rival), "at least 1.0 times vLLM")

    def latency(self) -> None:
        """Measure how running requests and a long prompt delay each other."""
        found = isolated("latency", latency, self.asked.budget)
        figure(
            "first_token_beside_64",
            _over(found, "first_token_ms", "first_token_alone_ms"),
            "at most 2 times that alone",
        )
        figure(
            "between_tokens_p99",
            _over(found, "between_tokens_p99_ms", "between_tokens_p50_ms"),
            "at most 3 times the median",
        )

    def deterministic(self) -> None:
        """Measure what it costs that numbers depend on their own sequence alone."""
        if "1.7B/ours/64" not in self.found:
            self.case("1.7B", "ours", partial(ours, "1.7B", MANY[:1]))
        self.case("deterministic", "ours", partial(ours, "1.7B", MANY[:1], deterministic=True))
        exact, plain = (self.found.get(f"{name}/ours/64", {}) for name in ("deterministic", "1.7B"))
        figure("deterministic_64", ratio(exact, plain), "said")

    def part(self, name: str) -> None:
        """Measure one part."""
        match name:
            case "1.7B":
                self.both("1.7B", [*MANY, ALONE], {"64": "1.1", "256": "1.0", "alone": "1.8"})
            case "4B":
                self.both("4B", [ALONE], {"alone": "1.4"})
            case "hybrid":
                self.both("Qwen3.5-4B", HYBRID, {"64": "1.0", "256": "1.0"})
            case "experts":
                self.experts()
            case "latency":
                self.latency()
            case "publish":
                figure(
                    "publish_local_ms",
                    isolated("publish", publish, self.asked.budget).get("publish_ms"),
                    "at most 50 ms",
                )
            case "publish_experts":
                found = isolated("publish_experts", partial(publish, "35B-A3B"), self.asked.budget)
                figure("publish_experts_ms", found.get("publish_ms"), "at most 500 ms")
            case "served":
                self.case("served", "ours", served)
                here, through = self.found.get("1.7B/ours/64", {}), self.found.get("served/ours/64", {})
                figure("served_64", ratio(through, here), "at least 0.9 of the sampler alone")
                figure("publish_served_ms", self.found.get("served/ours/publish", {}).get("publish_ms"), "")
            case "deterministic":
                self.deterministic()


def _over(found: Figures, one: str, other: str) -> float | None:
    return found[one] / found[other] if found else None


def main() -> None:
    """Measure what was asked for."""
    script = Script()
    for part in script.asked.parts:
        script.part(part)
    say(done=",".join(script.asked.parts))


if __name__ == "__main__":
    main()
