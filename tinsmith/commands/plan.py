"""`tinsmith plan`: prints what fits into the memory of a device."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tinsmith.commands.tables import table
from tinsmith.memory.plan import FullPlan, ModePlan, Plan
from tinsmith.models.machine import size_text

_LIMITS = {"memory": "the memory", "context": "the model's context"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan."""
    console.print(
        Text(
            f"{plan.model} ({plan.architecture}, {plan.parameters:,} parameters in {plan.dtype}"
            + ("" if plan.expert_dtype == "model" else f", experts in {plan.expert_dtype}")
            + f") on {plan.device}",
            "bold",
        )
    )
    console.print(table(_lines(plan)))
    if plan.workers > 1:
        console.print()
        _print_modes(plan, console)


def _print_modes(plan: Plan, console: Console) -> None:
    """A row for each use of several GPUs, and the choice."""
    rows = []
    for each in plan.modes:
        sizes = (each.weight_bytes, each.model_bytes, each.cache_bytes)
        longest = f"{each.longest_sequence:,} tokens" if each.fits else "does not fit"
        if each.fits and each.longest_together > each.longest_sequence:
            longest += f"; {each.longest_together:,} on all together"
        rows.append((each.mode, each.trains, *map(size_text, sizes), longest))
    heads = (f"on each of {plan.workers}", "trains", "base model", "trained model", "cache", "longest sequence")
    console.print(table(rows, heads))
    for trains, mode, why in _chosen(plan.modes):
        console.print(Text(f"{trains}: {mode}, {why}"))


def _chosen(modes: list[ModePlan]) -> Iterator[tuple[str, str, str]]:
    """Return what is trained, the mode for it, and why."""
    for trains in dict.fromkeys(each.trains for each in modes):
        fitting = next((each for each in modes if each.trains == trains and each.fits), None)
        if fitting is None:
            yield trains, "none", "because it does not fit into the memory of one worker"
        else:
            what = "a part of each layer" if fitting.mode == "sharded" else "the whole"
            yield trains, fitting.mode, f"because {what} fits on each ({fitting.settings})"


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
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
    largest = f"--tokens-per-pass {plan.largest_pass_tokens}" if plan.largest_pass_tokens else None
    remedies = " or ".join(filter(None, (largest, plan.advice)))
    none = "none fits beside all of that" + (f", one does with {remedies}" if remedies else "")
    fit = f"{adapters.fit:,} train at once beside all of that"
    if adapters.in_turns > adapters.fit:
        fit += f", {adapters.in_turns:,} in turns with those in host memory (--paged-state-share)"
    yield "adapters" if plan.rank else "models of rank 0", f"{fit if adapters.fit else none}; {each}"
    yield from _full_lines(plan.full_parameters)
    yield "longest sequence", f"{longest.tokens:,} tokens train, then {_LIMITS[longest.limit]} ends"
    if longest.together > longest.tokens:
        yield (
            "",
            f"{longest.together:,} tokens train on {plan.workers} workers together, each of which computes a slice",
        )
    if plan.advertised_context is not None:
        why = ""
        if longest.together == 0:
            why = ", to sample alone"
        elif plan.advertised_context < longest.together:
            why = ": the cache holds no more (--kv-cache-gib)"
        yield "told to clients", f"up to {plan.advertised_context:,} tokens{why}"


def _full_lines(full: FullPlan | None) -> Iterator[tuple[str, str]]:
    if full is None:
        return
    fits = "fits" if full.fits else "does not fit"
    yield (
        "all parameters (rank 0)",
        f"{fits}: {size_text(full.needed_bytes)} needed, {size_text(full.free_bytes)} left beside all of that",
    )
    named = {
        "weights": full.parts.weights,
        "masters" if full.state == "float32" else "rests of masters": full.parts.masters,
        "moments": full.parts.moments,
        "gradients": full.parts.gradients,
        "those of a pass": full.parts.pass_gradients,
    }
    total = " + ".join(f"{part} {size_text(size)}" for part, size in named.items() if size)
    yield (
        "",
        total
        + (f"; in host memory {size_text(full.parts.host)}" if full.parts.host else "")
        + f" (--full-state {full.state})",
    )
