"""How exact bfloat16 is on one GPU: against float32, beside transformers in bfloat16, and sampler against trainer.

Parts:

- layers   for each kind of layer: errors of hidden states, logprobs and adapter gradients against float32, over those
           that transformers + PEFT makes in bfloat16 (median over tokens, and over the matrices of the adapter)
- rule     the gated delta rule against float64: outputs and each gradient, ours and the PyTorch code of transformers
- curve    losses of 200 steps of LoRA training on text: how far bfloat16 drifts from float32, ours and PEFT's
- sampler  a model of width 512 is trained for a set time on the source files of Python's standard library, its bytes
           being the tokens; then logprobs of its samples, the sampler's against the trainer's; the same of an adapter
           that is trained for 50 steps on top
- hybrid   the same with a model of gated delta nets and attention

    python -m benchmarks.gpu.exactness --output benchmarks/results/exactness.txt
    TINY=1 python -m benchmarks.gpu.exactness
"""

import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, isolated, isolated_series, release
from benchmarks.gpu.sampling import SHARED_MEMORY, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, network_of, write_surroundings
from benchmarks.gpu.training import text_datum
from tinsmith.config import TrainingConfig
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import AdamSettings, LoraShape, WeightsRef
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.sampler import SampleResult
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.wire.chunks import TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

PARTS = ("layers", "rule", "curve", "sampler", "hybrid")
RANK = 4 if TINY else 32
LENGTHS = [24, 40] if TINY else [700, 1348]
STEPS = 12 if TINY else 200
EARLY = 6 if TINY else 30
SEEDS = (0, 1) if TINY else (0, 1, 2)
TRAINING_S = 6.0 if TINY else 60.0
ADAPTER_STEPS = 5 if TINY else 50
CONTEXT = 32 if TINY else 256


def kinds() -> dict[str, Any]:
    """Configurations of two layers of one kind each, as wide as published models, with a small vocabulary."""
    small = {"vocab_size": 2048, "num_hidden_layers": 2}
    return {
        "attention": configuration("4B", **small),
        "gated_attention": configuration("Qwen3.5-4B", **small, layer_types=["full_attention"] * 2),
        "delta_net": configuration("Qwen3.5-4B", **small, layer_types=["linear_attention"] * 2),
    }


def relative(found: Tensor, exact: Tensor) -> Tensor:
    """Distance of each row from the exact one, over its length: [rows, n] -> [rows]."""
    exact = exact.double()
    errors: Tensor = (found.to(exact) - exact).norm(dim=-1) / exact.norm(dim=-1)
    return errors


def compare_kind(name: str) -> Figures:
    """`compare_layers` on a random model of one of `kinds`."""
    config = kinds()[name]
    release()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        directory = write_surroundings(config, Path(folder))
        network_of(config, torch.float32).save_pretrained(directory)
        return compare_layers(directory)


def compare_layers(directory: Path) -> Figures:
    """Median errors of our bfloat16 over those of transformers, against our float32, on the model in `directory`."""
    from tests.bases import load, random_adapter
    from tests.training.test_against_peft import layers_of_adapter, peft_twin

    batch = _random_batch(LENGTHS)
    sides: dict[str, tuple[Tensor, Tensor, list[Tensor]]] = {}
    for dtype in ("float32", "bfloat16"):
        base = load(directory, device=DEVICE, dtype=dtype)
        adapter = random_adapter(base, rank=RANK, seed=1, b_scale=0.02)
        backend = LocalBackend(base, TrainingConfig())
        backend.optimizers["m"] = ModelOptimizer(adapter)
        outcome = backend.run_pass([text_datum("m", tokens) for tokens in batch], backward=True)
        logprobs = np.concatenate([result.logprobs[:-1] for result in outcome.results if result])
        gradients = [gradient.clone() for gradient in backend.optimizers["m"].accumulator.gradients or []]
        sides[dtype] = _hidden(base, adapter, batch), torch.from_numpy(logprobs).to(DEVICE), gradients
    twin = peft_twin(directory, base, adapter).to(DEVICE, torch.bfloat16)
    hidden, logprobs_of_twin = [], []
    for tokens in batch:
        ids = torch.from_numpy(tokens).long().to(DEVICE).unsqueeze(0)
        output = twin(input_ids=ids, use_cache=False, output_hidden_states=True)
        scores = output.logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        (-scores.sum()).backward()
        hidden.append(output.hidden_states[-1][0].detach())
        logprobs_of_twin.append(scores.detach())
    theirs = []
    modules = {path: twin.base_model.model.get_submodule(path) for path in layers_of_adapter(base, adapter)}
    grouped = layers_of_adapter(base, adapter)
    by_name: dict[str, list[Tensor]] = {}
    for path, names in grouped.items():
        of_a, of_b = (matrix["default"].weight.grad for matrix in (modules[path].lora_A, modules[path].lora_B))
        sizes = [base.layout.targets[name].out_features for name in names]
        blocks = [rows.split(RANK, dim=1)[index] for index, rows in enumerate(of_b.split(sizes))]
        by_name |= {name: [a, b] for name, a, b in zip(names, of_a.split(RANK), blocks, strict=True)}
    theirs = [gradient for name in adapter.masters for gradient in by_name[name]]
    exact, mine = sides["float32"], sides["bfloat16"]
    return {
        **_ratio("hidden", relative(mine[0], exact[0]), relative(torch.cat(hidden), exact[0])),
        **_ratio("logprob", (mine[1] - exact[1]).abs(), (torch.cat(logprobs_of_twin) - exact[1]).abs()),
        **_ratio("gradient", _each(mine[2], exact[2]), _each(theirs, exact[2])),
    }


def _each(found: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Relative errors of matrices."""
    return torch.stack(
        [relative(a.flatten().unsqueeze(0), b.flatten().unsqueeze(0))[0] for a, b in zip(found, exact, strict=True)]
    )


def _ratio(name: str, mine: Tensor, theirs: Tensor) -> Figures:
    ours, other = mine.double().median().item(), theirs.double().median().item()
    return {f"{name}_ratio": ours / other, f"{name}_ours": ours, f"{name}_transformers": other}


@torch.no_grad()
def _hidden(base: BaseModel, adapter: Any, batch: Sequence[NDArray[np.int32]]) -> Tensor:
    """[tokens, hidden] of all sequences, in one row."""
    rendered = [RenderedInput(tokens, (), (), torch.arange(len(tokens)).unsqueeze(0)) for tokens in batch]
    row = pack(rendered, [adapter] * len(batch), base.device)
    return base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))


def _random_batch(lengths: Sequence[int]) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 1500, length).astype(np.int32) for length in lengths]


def rule() -> Figures:
    """The gated delta rule: ours and that of transformers in bfloat16, against ours in float64."""
    import inspect

    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from tinsmith.models.delta_rule import gated_delta_rule_anew

    text = configuration("Qwen3.5-4B")
    keys, values, width = text.linear_num_key_heads, text.linear_num_value_heads, text.linear_key_head_dim
    length = 2 * (48 if TINY else 1024)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator).to(torch.bfloat16)

    inputs = [
        drawn(keys, width),
        drawn(keys, width),
        drawn(values, width),
        -drawn(values).float().abs() * 0.1,
        drawn(values).sigmoid(),
    ]
    direction = drawn(values, width)

    def ours(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule_anew(query, key, value, decay, beta, (length // 2, length // 2))

    def theirs(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        repeated = (x.repeat_interleave(values // keys, 1) for x in (query, key))
        rows = (x.unflatten(0, (2, -1)) for x in (*repeated, value, decay, beta))
        out: Tensor = inspect.unwrap(torch_chunk_gated_delta_rule)(*rows, use_qk_l2norm_in_kernel=True)[0]
        return out.flatten(0, 1)

    def answers(function: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        placed = [x.to(DEVICE, dtype or x.dtype).requires_grad_() for x in inputs]
        out = function(*placed)
        return [x.double() for x in (out, *torch.autograd.grad(out, placed, direction.to(out)))]

    exact = answers(ours, torch.float64)
    names = ("out", "query", "key", "value", "decay", "beta")
    found: Figures = {}
    for side, function in (("ours", ours), ("transformers", theirs)):
        found |= {
            f"{name}_{side}": error.item()
            for name, error in zip(names, _each(answers(function, None), exact), strict=True)
        }
    return found


# Text that every machine with Python has


@cache
def corpus() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes of the standard library's modules: to train on, and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [np.frombuffer(file.read_bytes(), dtype=np.uint8) for file in files]
    return np.concatenate(texts[:-20]), np.concatenate(texts[-20:])


def text_batch(
    generator: np.random.Generator, source: NDArray[np.uint8], rows: int, length: int = CONTEXT
) -> list[NDArray[np.int32]]:
    """Random pieces of a text."""
    starts = generator.integers(0, len(source) - length, rows)
    return [source[start : start + length].astype(np.int32) for start in starts]


def small_config(hybrid: bool) -> Any:
    """A model of width 512; its vocabulary exceeds the 256 bytes, as loading wants a tokenizer with more tokens."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    sizes |= {"vocab_size": 2048, "num_hidden_layers": 8}
    delta = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    if TINY:
        sizes, delta = {"vocab_size": 2048}, {}
    return configuration("Qwen3.5-4B", **sizes, **delta) if hybrid else configuration("4B", **sizes)


def curve(seeds: Sequence[int] = SEEDS) -> Figures:
    """How far bfloat16 losses drift from our float32 ones in training from one start: ours and transformers + PEFT.

    Losses are means per token. Each seed is another order of texts. How far a curve drifts depends on the texts most of
    all, so the drifts of one seed are compared with each other; a ratio is the geometric mean over the seeds. In the
    first `EARLY` steps the curves are as far apart as rounding has pushed them (`early_ratio`); after that training
    itself enlarges any distance, whatever made it (`drift_ratio`, over all steps).
    """
    config = small_config(hybrid=False)
    found: Figures = {}
    ratios, early = [], []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        directory = write_surroundings(config, Path(folder))
        network_of(config, torch.float32).save_pretrained(directory)
        for seed in seeds:
            generator = np.random.default_rng(seed)
            batches = [text_batch(generator, corpus()[0], 16) for _ in range(STEPS)]
            tokens = sum(len(row) - 1 for row in batches[0])
            exact = np.array(_our_losses(directory, "float32", batches)) / tokens
            mine = np.array(_our_losses(directory, "bfloat16", batches)) / tokens
            theirs = np.array(_peft_losses(directory, batches)) / tokens
            apart, other = np.abs(mine - exact), np.abs(theirs - exact)
            ratios.append(np.median(apart) / np.median(other))
            early.append(np.median(apart[:EARLY]) / np.median(other[:EARLY]))
            found |= {
                f"drift_ours_{seed}": float(np.median(apart)),
                f"drift_transformers_{seed}": float(np.median(other)),
                f"worst_ours_{seed}": float(apart.max()),
                f"worst_transformers_{seed}": float(other.max()),
                f"bias_ours_{seed}": float((mine - exact).mean()),
                f"bias_transformers_{seed}": float((theirs - exact).mean()),
                f"loss_first_{seed}": float(exact[0]),
                f"loss_last_float32_{seed}": float(exact[-5:].mean()),
            }
    worst = max(found[f"drift_ours_{seed}"] for seed in seeds)
    return {"early_ratio": _mean_ratio(early), "drift_ratio": _mean_ratio(ratios), "drift_ours": worst, **found}


def _mean_ratio(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


LORA_ADAM = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)


def _our_losses(directory: Path, dtype: str, batches: Sequence[Sequence[NDArray[np.int32]]]) -> list[float]:
    from tests.bases import load

    backend = LocalBackend(load(directory, device=DEVICE, dtype=dtype), TrainingConfig())
    backend.create_model("m", LoraShape(RANK, seed=0, train_unembed=False))
    return [_step(backend, batch, LORA_ADAM) for batch in batches]


def _step(backend: LocalBackend, batch: Sequence[NDArray[np.int32]], settings: AdamSettings) -> float:
    """A step whose gradient is the mean over its tokens; returns the sum of losses."""
    outcome = backend.run_pass([text_datum("m", tokens) for tokens in batch], backward=True)
    if outcome.failures:
        raise RuntimeError(str(outcome.failures))
    backend.optim_step("m", settings)
    return sum(result.loss for result in outcome.results if result)


def _peft_losses(directory: Path, batches: Sequence[Sequence[NDArray[np.int32]]]) -> list[float]:
    from tests.bases import load, random_adapter
    from tests.training.test_against_peft import peft_twin

    base = load(directory, device=DEVICE, dtype="bfloat16")
    blank = random_adapter(base, rank=RANK, seed=0, b_scale=0.0, train_unembed=False)
    twin = peft_twin(directory, base, blank).to(DEVICE, torch.bfloat16)
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LORA_ADAM.lr, betas=LORA_ADAM.betas, eps=LORA_ADAM.eps, weight_decay=0.0)
    losses = []
    for batch in batches:
        ids = torch.from_numpy(np.stack(batch)).long().to(DEVICE)
        loss = twin(input_ids=ids, labels=ids, use_cache=False).loss * ids[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sampler_against_trainer(hybrid: bool, seconds: float = TRAINING_S) -> Figures:
    """Train a small model on text for `seconds`, then compare the sampler's logprobs of its samples with the trainer's.

    The same again for an adapter that is trained on top.
    """
    began = time.perf_counter()
    config = small_config(hybrid)
    backend = LocalBackend(base_of(config), TrainingConfig())
    backend.create_model("m", LoraShape(0, seed=0))
    generator = np.random.default_rng(0)
    learning, held_out = corpus()
    steps = 0
    while time.perf_counter() - began < seconds:
        rate = 1e-3 * min(1.0, (steps + 1) / 50) * max(0.05, 1 - (time.perf_counter() - began) / seconds)
        _step(
            backend, text_batch(generator, learning, 4 if TINY else 32), AdamSettings(rate, (0.9, 0.95), 1e-8, 0.0, 0.0)
        )
        steps += 1
    trained_s = time.perf_counter() - began
    found = _against_trainer(backend, held_out, generator)
    adapted = LocalBackend(_as_base(config, backend), TrainingConfig())
    adapted.create_model("m", LoraShape(RANK, seed=0))
    for _ in range(ADAPTER_STEPS):
        _step(
            adapted, text_batch(generator, learning, 4 if TINY else 32), AdamSettings(3e-4, (0.9, 0.95), 1e-8, 0.0, 0.0)
        )
    with_adapter = {f"adapter_{name}": value for name, value in _against_trainer(adapted, held_out, generator).items()}
    return found | with_adapter | {"steps": steps, "training_s": trained_s}


def _as_base(config: Any, backend: LocalBackend) -> BaseModel:
    """A base model with the weights that the backend's model has learned."""
    network = network_of(config)
    weights = backend.optimizers["m"].weights
    with torch.no_grad():
        for name, learned in weights.named_tensors().items():
            parameter = network.lm_head.weight if name == backend.base.head_name else network.model.get_parameter(name)
            parameter.copy_(learned)
    return base_of(config, network)


def _against_trainer(backend: LocalBackend, held_out: NDArray[np.uint8], generator: np.random.Generator) -> Figures:
    """Log-probabilities of samples of the backend's model: the sampler's against the trainer's."""
    unseen = text_batch(generator, held_out, 8 if TINY else 64)
    scores = np.concatenate(_logprobs(backend, unseen))
    weights = backend.snapshot("m", WeightsRef("bench", "trained", "trained"))
    sampler = sampler_of(backend.base, cache_gib=0.05 if TINY else 2.0)
    prompts = text_batch(generator, held_out, 4 if TINY else 64, CONTEXT // 4)
    params = SamplingParams(CONTEXT // 2, 1.0, 1.0, -1, 0, StopRule(eos=False, strings=(), token_ids=()))
    for number, prompt in enumerate(prompts):
        request = SampleRequest("bench", number, 1, [TextChunk(prompt)], params, PromptQuestions())
        rendered = RenderedInput(prompt, (), (), torch.arange(len(prompt)).unsqueeze(0))
        sampler.add(str(number), request, rendered, weights)
    answers: dict[int, Any] = {}
    while sampler.has_work:
        answers |= {
            int(event.request_id): event.sequences[0] for event in stepped(sampler) if isinstance(event, SampleResult)
        }
    whole = [np.concatenate([prompt, answers[number].tokens]).astype(np.int32) for number, prompt in enumerate(prompts)]
    again = [found[len(prompts[0]) - 1 :] for found in _logprobs(backend, whole)]
    apart = np.abs(np.concatenate(again) - np.concatenate([answers[number].logprobs for number in range(len(prompts))]))
    return {
        "mean_difference": float(apart.mean()),
        "p99_difference": float(np.quantile(apart, 0.99)),
        "largest_difference": float(apart.max()),
        "held_out_nats": float(-scores.mean()),
        "entropy_of_samples_nats": float(-np.concatenate(again).mean()),
    }


def _logprobs(backend: LocalBackend, batch: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """The trainer's log-probabilities of all tokens of each sequence but the first."""
    results = backend.run_pass([text_datum("m", tokens) for tokens in batch], backward=False).results
    return [result.logprobs[:-1] for result in results if result]


def main() -> None:
    """Measure what was asked for."""
    asked = begin(__doc__, PARTS)
    for part in asked.parts:
        match part:
            case "layers":
                compared = isolated_series(
                    "layers", lambda: ((kind, compare_kind(kind)) for kind in kinds()), asked.budget
                )
                for name, found in compared.items():
                    for what in ("hidden", "logprob", "gradient"):
                        figure(f"{name}_{what}", found[f"{what}_ratio"], "at most 1.1 times the error of transformers")
            case "rule":
                found = isolated("rule", rule, asked.budget)
                names = ("out", "query", "key", "value", "beta")
                worst = (
                    max((found[f"{name}_ours"] / found[f"{name}_transformers"] for name in names), default=0.0)
                    if found
                    else None
                )
                figure("delta_rule_worst", worst, "at most 1.1 times the error of transformers")
            case "curve":
                found = isolated("curve", curve, asked.budget)
                figure("curve_early_drift", found.get("early_ratio"), "at most 1.1 times the drift of transformers")
                figure("curve_drift", found.get("drift_ratio"), "at most 1.1 times the drift of transformers")
            case "sampler" | "hybrid":
                found = isolated(part, partial(sampler_against_trainer, part == "hybrid"), asked.budget)
                nats = found.get("held_out_nats", 0.0)
                figure(f"{part}_against_trainer", found.get("mean_difference"), "at most 0.01", held_out_nats=nats)
                figure(f"{part}_adapter_against_trainer", found.get("adapter_mean_difference"), "at most 0.01")


if __name__ == "__main__":
    main()
