"""`tinsmith plan`: what LoRA trains in a model, what fits into a device, how long a sequence trains, in which mode. No weight is read."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinsmith.config import Config, ModelsConfig, base_model_sources
from tinsmith.engine.devices import gpus_needed, worker_count
from tinsmith.errors import ConfigError
from tinsmith.memory.modes import ModePlan, Share, can_be_divided, chosen, plan_modes
from tinsmith.models.machine import look_around, size_text
from tinsmith.protocol.facts import advertised_context

if TYPE_CHECKING:
    from tinsmith.models.full import FullBytes, FullState
    from tinsmith.models.layout import Group
    from tinsmith.models.sizing import Sizes

GIB = 2**30
_LIMITS = {"memory": "the memory", "context": "the model's context"}


@dataclass(frozen=True)
class CachePlan:
    """What the local sampler's cache holds (--kv-cache-gib)."""

    bytes: int
    blocks: int
    """Blocks of keys and values."""
    tokens: int
    """Tokens in all of these blocks."""
    state_slots: int
    """States of sequences, one for all gated delta nets of the model; 0 if it has none."""
    state_bytes: int
    """One of these states."""


@dataclass(frozen=True)
class AdaptersPlan:
    """Adapters that are trained."""

    bytes_each: int
    """Weights, accumulated gradients and what AdamW remembers."""
    snapshot_bytes: int
    """A frozen copy to sample from."""
    fit: int
    """How many fit beside weights, cache and a pass that recomputes its layers."""


@dataclass(frozen=True)
class FullPlan:
    """Training of all parameters (rank 0), beside weights, cache and pass."""

    state: "FullState"
    """How it is kept (--full-state)."""
    parts: "FullBytes"
    """What it takes."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of the device."""
        return self.parts.device

    @property
    def fits(self) -> bool:
        """Whether one such model can be trained."""
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True)
class SequencePlan:
    """The longest sequence that trains with one adapter, in a pass of its own."""

    tokens: int
    limit: Literal["memory", "context"]
    """What keeps it from being longer: the memory, or the context of the model (--max-context)."""
    together: int
    """The longest that all workers compute together, each a slice of it; where that is never done, it is `tokens`."""


@dataclass(frozen=True)
class Plan:
    """The whole answer. Sizes are in bytes, and passes are estimated."""

    model: str
    architecture: str
    parameters: int
    rank: int
    lora_parameters: "dict[Group, int]"
    """What an adapter of this rank trains, by the switches of `create_lora_training_client`."""
    dtype: str
    device: str
    memory_bytes: int
    """What a server may take of the device (--memory-share): of all that it has, or of what is free if it is this machine's."""
    weight_bytes: int
    """The frozen base model."""
    reserve_bytes: int
    """What nothing is planned into: libraries, captured graphs, pictures, steps of the sampler."""
    pass_tokens: int
    """The largest pass of several sequences (--tokens-per-pass)."""
    pass_bytes: int
    """What such a pass takes."""
    largest_pass_tokens: int
    """The largest pass that fits beside one model; no more than `pass_tokens`."""
    recomputed_layers: int
    """How many layers such a pass must recompute to fit beside one adapter."""
    cache: CachePlan | None
    """None without the local sampler."""
    adapters: AdaptersPlan
    full_parameters: FullPlan
    longest_sequence: SequencePlan
    advertised_context: int | None
    """What a server tells its clients (`max_context_length`): what trains and is sampled. None with vLLM, whose room is not planned."""
    workers: int
    """How many train together (--workers). All sizes are those of one of them."""
    modes: list[ModePlan]
    """What may be trained on so many workers, and how."""

    @property
    def fits(self) -> bool:
        """Whether the model can be served and trained with LoRA at all."""
        return self.adapters.fit > 0


def make_plan(config: Config, rank: int, memory_gib: float | None) -> Plan:
    """The plan for the one base model of `config`, on GPUs of this memory; None means the devices that this machine would serve it on.

    GPUs that need not be here have a host with as much memory as all of them. Raises ConfigError if the configuration of the model cannot
    be read, or if it could not be served.
    """
    from tinsmith.models.budget import (  # here, because they import transformers
        computes_together,
        divide_memory,
        full_state,
        longest_together,
        longest_trained,
        reserve_of,
    )
    from tinsmith.models.sizing import beside_weights, size_of
    from tinsmith.sampling.local.cache_shape import CacheShape
    from tinsmith.sampling.prefix import BLOCK

    ((name, source),) = base_model_sources(config).items()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, planned_rank=rank))
    shared = config.divides
    if memory_gib is None:
        workers = worker_count(config, usable=len(look_around().gpus))
        sizes = size_of(source, config.models)
        place = _here(sizes, workers)
    else:
        workers = worker_count(config, gpus_needed(config))
        sizes = size_of(source, _on_a_gpu(config.models))
        memory = int(memory_gib * GIB)
        place = _Place("a GPU (--memory-gib)", True, memory, memory, host_free=memory)
    memory, reserve = place.memory(config), reserve_of(place.on_gpu, place.total)
    modes = plan_modes(sizes, Share(memory - reserve, place.host_free, place.on_gpu), config, rank, workers)
    if shared:
        if not can_be_divided(sizes):
            raise ConfigError(f"--shard weights: Tinsmith does not divide the layers of {sizes.layout.family.model_type}; leave it out")
        sizes = dataclasses.replace(sizes, parts=workers)
    left = beside_weights(memory - reserve, [sizes])
    state = full_state(config.training)
    model, passes = sizes.model(rank, state), sizes.passes
    budget = divide_memory(left, 1, model, passes, config, place.on_gpu)
    cache = None
    if config.sampling.sampler == "local":
        shape = CacheShape(sizes.layout.layers, sizes.dtype, sizes.device)
        divided = shape.divide(budget.cache, config.sampling.max_running)
        cache = CachePlan(budget.cache, divided.blocks, divided.blocks * BLOCK, divided.slots, shape.state_bytes)
    left -= budget.cache
    tokens, chunk = config.training.tokens_per_pass, config.training.logits_chunk
    effort = passes.effort_for(tokens, chunk, budget.passes) or passes.smallest
    longest = longest_trained(budget, passes, config, sizes.max_context, place.host_free, place.on_gpu)
    together = longest
    if computes_together(config, workers):
        slices = sizes.passes_of_slices(workers)
        together = max(longest, longest_together(budget, slices, workers, config, sizes.max_context, place.host_free, place.on_gpu))
    beside = max(0, left - passes.bytes(tokens, chunk, passes.smallest))
    return Plan(
        model=name,
        architecture=sizes.layout.family.model_type,
        parameters=sizes.parameters,
        rank=rank,
        lora_parameters=sizes.layout.group_parameters(rank),
        dtype=str(sizes.dtype).removeprefix("torch."),
        device=place.name,
        memory_bytes=memory,
        weight_bytes=sizes.weight_bytes,
        reserve_bytes=reserve,
        pass_tokens=tokens,
        pass_bytes=passes.bytes(tokens, chunk, effort),
        largest_pass_tokens=passes.longest(chunk, budget.passes, 0, tokens),
        recomputed_layers=effort.recompute,
        cache=cache,
        adapters=AdaptersPlan(model.training, model.snapshot, beside // model.training),
        full_parameters=FullPlan(state, sizes.full(state), beside),
        longest_sequence=SequencePlan(longest, "memory" if longest < sizes.max_context else "context", together),
        advertised_context=_advertised(config, sizes.max_context, cache, together),
        workers=workers,
        modes=modes,
    )


def _advertised(config: Config, max_context: int, cache: CachePlan | None, trained: int) -> int | None:
    """What clients are told, if sequences of `trained` tokens train."""
    if config.sampling.sampler == "vllm":
        return None
    return advertised_context(trained, max_context if cache is None else min(max_context, cache.tokens))


@dataclass(frozen=True)
class _Place:
    """A device on which a worker would serve the model, and memory in bytes."""

    name: str
    on_gpu: bool
    free: int
    total: int
    host_free: int
    """This worker's part of it."""

    def memory(self, config: Config) -> int:
        """What a server may take of the device."""
        return min(self.free, int(config.models.memory_share * self.total))


def share_here(sizes: "Sizes", config: Config, workers: int) -> Share:
    """What each of so many workers may take of this machine, of the device on which they would serve the model."""
    from tinsmith.models.budget import reserve_of  # it imports transformers

    place = _here(sizes, workers)
    return Share(place.memory(config) - reserve_of(place.on_gpu, place.total), place.host_free, place.on_gpu)


def _here(sizes: "Sizes", workers: int) -> _Place:
    """The device of this machine that would serve the model; of several the one with least free memory."""
    machine = look_around()
    host = machine.memory_available // workers
    if sizes.device.type == "cpu":
        return _Place("the CPU of this machine", False, host, machine.memory_total, host)
    first = sizes.device.index or 0
    gpu = min(machine.gpus[first : first + workers], key=lambda gpu: gpu.free)
    return _Place(f"cuda:{gpu.index}, {gpu.name}", True, gpu.free, gpu.total, host)


def _on_a_gpu(models: ModelsConfig) -> ModelsConfig:
    """The settings with which a GPU, which need not be here, would serve a model."""
    return dataclasses.replace(models, device="cpu", dtype="bfloat16" if models.dtype == "auto" else models.dtype)


def to_tree(plan: Plan) -> dict[str, object]:
    """The plan as plain values, with what follows from them."""
    tree: dict[str, object] = dataclasses.asdict(plan)
    sums = {"needed_bytes": plan.full_parameters.needed_bytes, "fits": plan.full_parameters.fits}
    full = dataclasses.asdict(plan.full_parameters) | sums
    return tree | {"full_parameters": full, "fits": plan.fits}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan for a person."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for subject, detail in _lines(plan):
        table.add_row(Text(subject), Text(detail))
    console.print(Text(f"{plan.model} ({plan.architecture}, {plan.parameters:,} parameters in {plan.dtype}) on {plan.device}", "bold"))
    console.print(table)
    if plan.workers > 1:
        console.print()
        _print_modes(plan, console)


def _print_modes(plan: Plan, console: Console) -> None:
    """A row for each way of using several GPUs, and the mode that is chosen."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in (f"on each of {plan.workers}", "trains", "base model", "trained model", "cache", "longest sequence"):
        table.add_column(Text(head))
    for each in plan.modes:
        sizes = (each.weight_bytes, each.model_bytes, each.cache_bytes)
        longest = f"{each.longest_sequence:,} tokens" if each.fits else "does not fit"
        if each.fits and each.longest_together > each.longest_sequence:
            longest += f"; {each.longest_together:,} on all together"
        table.add_row(*map(Text, (each.mode, each.trains, *map(size_text, sizes), longest)))
    console.print(table)
    for trains, mode, why in chosen(plan.modes):
        console.print(Text(f"{trains}: {mode}, {why}"))


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Subject and detail of each line."""
    longest = plan.longest_sequence
    groups = " + ".join(f"{group} {count:,}" for group, count in plan.lora_parameters.items())
    if plan.rank:
        yield f"LoRA of rank {plan.rank}", f"{groups} = {sum(plan.lora_parameters.values()):,} parameters"
    yield "memory", size_text(plan.memory_bytes)
    yield "frozen weights", size_text(plan.weight_bytes)
    if plan.reserve_bytes:
        yield "reserve", f"{size_text(plan.reserve_bytes)} for libraries, captured graphs and steps of the sampler"
    if plan.cache is not None:
        holds = f"{plan.cache.blocks:,} blocks, {plan.cache.tokens:,} tokens"
        if plan.cache.state_slots:
            holds += f"; {plan.cache.state_slots:,} states of {size_text(plan.cache.state_bytes)} of sequences"
        yield "cache (--kv-cache-gib)", f"{size_text(plan.cache.bytes)}: {holds}"
    again = f", {plan.recomputed_layers} layers of it recomputed" if plan.recomputed_layers else ""
    yield f"a pass of {plan.pass_tokens:,} tokens", f"{size_text(plan.pass_bytes)}, roughly (--tokens-per-pass){again}"
    adapters = plan.adapters
    each = f"{size_text(adapters.bytes_each)} each, a snapshot to sample {size_text(adapters.snapshot_bytes)}"
    none = "none fits beside all of that" + (
        f", one does with --tokens-per-pass {largest}" if (largest := plan.largest_pass_tokens) else ""
    )
    yield (
        "adapters" if plan.rank else "models of rank 0",
        f"{f'{adapters.fit:,} train at once beside all of that' if adapters.fit else none}; {each}",
    )
    yield from _full_lines(plan.full_parameters)
    yield "longest sequence", f"{longest.tokens:,} tokens train, then {_LIMITS[longest.limit]} ends"
    if longest.together > longest.tokens:
        yield "", f"{longest.together:,} tokens train on {plan.workers} workers together, each of which computes a slice"
    if plan.advertised_context is not None:
        why = ""
        if longest.together == 0:
            why = ", to sample alone"
        elif plan.advertised_context < longest.together:
            why = ": the cache holds no more (--kv-cache-gib)"
        yield "told to clients", f"up to {plan.advertised_context:,} tokens{why}"


def _full_lines(full: FullPlan) -> Iterator[tuple[str, str]]:
    """Those of training all parameters."""
    fits = "fits" if full.fits else "does not fit"
    yield "all parameters (rank 0)", f"{fits}: {size_text(full.needed_bytes)} needed, {size_text(full.free_bytes)} left beside all of that"
    named = {
        "weights": full.parts.weights,
        "masters" if full.state == "float32" else "rests of masters": full.parts.masters,
        "moments": full.parts.moments,
        "gradients": full.parts.gradients,
        "those of a pass": full.parts.pass_gradients,
    }
    total = " + ".join(f"{part} {size_text(size)}" for part, size in named.items() if size)
    yield "", total + (f"; in host memory {size_text(full.parts.host)}" if full.parts.host else "") + f" (--full-state {full.state})"
