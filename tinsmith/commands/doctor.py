"""`tinsmith doctor`: what this machine offers, what fits on it, and what is missing.

No weight is read, but all of a database that is there.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from tinsmith.commands.tables import table
from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError, reported
from tinsmith.models.files import problems
from tinsmith.models.machine import (
    INSTALLED,
    SUPPORTED,
    VARLEN_CAPABILITY,
    Machine,
    is_supported,
    look_around,
    size_text,
)
from tinsmith.protocol.devices import visible_gpus, worker_count
from tinsmith.server.main import listening
from tinsmith.store.database import look_into
from tinsmith.store.disk import is_used

if TYPE_CHECKING:
    from tinsmith.memory.plan import BasePlan
    from tinsmith.memory.sizing import Sizes

RANK = 32
"""Rank of sampled adapters in estimates."""
GIB = 2**30
EXTRAS = {"demo": ("tinker", "matplotlib", "sklearn"), "tests": ("tinker", "pytest", "peft", "httpx", "hypothesis")}
"""Modules that these parts need beside those for serving."""
INSTALLERS = {"demo": "make demo", "tests": "make dev"}

State = Literal["ok", "note", "missing"]
_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class Finding:
    """A line of the report. `missing` means that serving cannot work."""

    subject: str
    state: State
    detail: str


def run_doctor(config: Config, console: Console) -> int:
    """Print the report; returns the exit code, 1 if something is missing."""
    machine = look_around()
    sections = {
        "machine": [*_machine(machine), *_or_missing("workers", _workers(config, machine))],
        "software": list(_software()),
        "storage": list(_storage(Path(config.data_dir), config.database_url)),
        "address": list(_or_missing("listens on", _address(config))),
    }
    if config.base_models:
        sections["what fits"] = list(_models(config, machine))
    sections["features"] = list(_features(machine))
    for title, findings in sections.items():
        console.print(
            table(
                ((each.subject, Text(each.state, _STYLES[each.state]), each.detail) for each in findings), title=title
            )
        )
    missing = dict.fromkeys(
        finding.subject for findings in sections.values() for finding in findings if finding.state == "missing"
    )
    console.print(
        Text(f"missing: {', '.join(missing)}", "bold red") if missing else Text("nothing is missing", "bold green")
    )
    return 1 if missing else 0


def _or_missing(subject: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; a ConfigError ends them as one more."""
    try:
        yield from findings
    except ConfigError as error:
        yield Finding(subject, "missing", str(error))


def _machine(machine: Machine) -> Iterator[Finding]:
    yield Finding("CPU", "ok", f"{machine.cpus} cores")
    yield Finding("memory", "ok", f"{_gib(machine.memory_available)} of {_gib(machine.memory_total)} available")
    for gpu in machine.gpus:
        detail = (
            f"{gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} free, capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}"
        )
        yield Finding(f"cuda:{gpu.index}", "ok", detail)
    if not machine.gpus:
        yield Finding("CUDA", "note", f"{machine.no_gpu_because}; models run on the CPU")


def _workers(config: Config, machine: Machine) -> Iterator[Finding]:
    """Workers that would start, and whether PyTorch can use a GPU for each."""
    usable, visible = len(machine.gpus), visible_gpus()
    count = worker_count(config, usable=usable)
    fewer = ""
    if usable < visible and config.models.device != "cpu" and not config.distributed.ray_address:
        why = f": {machine.no_gpu_because}" if machine.no_gpu_because else ""
        fewer = f"PyTorch can use {usable} of the {visible} visible GPUs{why}"
    if not config.distributed.workers:
        own = f"{count} of the {usable} GPUs, each with a worker of its own" if count > 1 else "one"
        yield Finding(
            "workers", "note" if fewer else "ok", f"{own} (--workers 0, the default){f'; {fewer}' if fewer else ''}"
        )
    elif fewer and count > max(1, usable):
        yield Finding(
            "workers", "missing", f"--workers {count}: {fewer}; ask for {max(1, usable)}, or add --device cpu"
        )
    else:
        yield Finding("workers", "ok", f"{count} (--workers)")


def _software() -> Iterator[Finding]:
    for library, (first, beyond) in SUPPORTED.items():
        wanted = f"needs >= {first[0]}.{first[1]}, < {beyond[0]}.{beyond[1]}"
        state: State = "ok" if is_supported(library) else "missing"
        yield Finding(library, state, f"{INSTALLED[library]} ({wanted})")


def _storage(data_dir: Path, url: str) -> Iterator[Finding]:
    there = next(path for path in (data_dir.absolute(), *data_dir.absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        yield Finding("data directory", "ok", f"{data_dir}: {_gib(shutil.disk_usage(there).free)} free on its disk")
    else:
        yield Finding(
            "data directory", "missing", f"{data_dir}: cannot write to {there}; choose another with --data-dir"
        )
    yield from _or_missing("data directory", _use(data_dir))
    yield from _or_missing("database", _database(data_dir, url))
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield Finding("shared memory", "ok", f"{_gib(shutil.disk_usage(shared).free)} free in {shared}")


def _use(data_dir: Path) -> Iterator[Finding]:
    if is_used(data_dir):
        yield Finding(
            "data directory",
            "missing",
            f"{data_dir} is used by another server; stop it, or choose another with --data-dir",
        )


def _database(data_dir: Path, url: str) -> Iterator[Finding]:
    if name := look_into(data_dir, url):
        yield Finding("database", "ok", f"all of {name} can be read")


def _address(config: Config) -> Iterator[Finding]:
    with listening(config.server.host, config.server.port):
        yield Finding("listens on", "ok", f"{config.server.host}, port {config.server.port}")


def _models(config: Config, machine: Machine) -> Iterator[Finding]:
    """Sizes of each base model, and whether all fit."""
    from tinsmith.memory.plan import place_here, plan_base  # here, because these import transformers
    from tinsmith.memory.sizing import require_sampler, size_of
    from tinsmith.models.base import loading_of

    workers = _count(config, machine)
    known: dict[str, Sizes] = {}
    for name, source in base_model_sources(config).items():
        wrong = list(problems(source, whole=True))
        yield from (Finding(name, "missing", problem) for problem in wrong)
        unreadable: list[Exception] = []  # by transformers, or it cannot be fetched
        with reported((ConfigError, OSError, ValueError), unreadable.append):
            if not wrong:
                sizes = size_of(source, loading_of(config))
                require_sampler(name, sizes.layout, config)
                known[name] = replace(sizes, parts=workers if config.shards_weights else 1)
                _load_all_but_weights(source)
        yield from (Finding(name, "missing", str(error).splitlines()[0]) for error in unreadable)
    if not known:
        return
    place = place_here(next(iter(known.values())), machine, config, workers)
    needed = place.reserve
    for name, sizes in known.items():
        planned = plan_base(sizes, [each for other, each in known.items() if other != name], place, config, workers)
        cached = list(_or_missing(name, _cache(planned)))
        if any(finding.state == "missing" for finding in cached):
            yield from cached
            continue
        parts = {"weights": sizes.weight_bytes}
        if planned.cache is not None:
            parts["key/value cache (--kv-cache-gib)"] = planned.budget.cache
        parts |= _to_train(planned)
        needed += sum(parts.values())
        yield Finding(
            name,
            "ok",
            f"{sizes.parameters:,} parameters, {str(sizes.dtype).removeprefix('torch.')} on {sizes.device.type}"
            + (f", experts in {sizes.expert_format.name}" if sizes.expert_format else ""),
        )
        yield from (Finding(f"  {part}", "ok", size_text(size)) for part, size in parts.items())
        yield from cached
        if config.training.trains:
            model = planned.model
            many = f"; {planned.fit:,} train at once" if planned.place.on_gpu else ""
            if planned.in_turns > planned.fit:
                many += f", {planned.in_turns:,} in turns with those in host memory (--paged-state-share)"
            yield Finding(
                "  one more trained model",
                "ok",
                f"{size_text(model.training)}; a snapshot {size_text(model.snapshot)}{many}",
            )
        else:
            yield Finding(
                "  a sampled adapter", "ok", f"{size_text(sizes.model(RANK).snapshot)} at rank {RANK} (--snapshot-gib)"
            )
    fits: State = "ok" if needed <= place.free else "missing"
    where = place.name.partition(",")[0] if place.on_gpu else "memory"
    detail = f"about {_gib(needed)} needed, {_gib(place.free)} free"
    saved = sum(sizes.weight_bytes - smaller.weight_bytes for sizes in known.values() if (smaller := sizes.with_fp8))
    if fits == "missing" and needed - saved <= place.free:
        detail += f"; --expert-dtype fp8 needs {_gib(saved)} less"
    yield Finding(f"{where} for all of it", fits, detail)
    yield from _full_training(known, place.free - needed, config)


def _load_all_but_weights(source: str) -> None:
    """Load tokenizer and image processor of a directory. Raises ConfigError."""
    from tinsmith.models.base import load_tokenizer  # here, because these import transformers
    from tinsmith.models.families import IMAGE_FAMILIES, read_config
    from tinsmith.rendering.processor import LocalProcessor

    if Path(source).is_dir():
        load_tokenizer(source)
        if read_config(source).model_type in IMAGE_FAMILIES:
            LocalProcessor(source)


def _count(config: Config, machine: Machine) -> int:
    with suppress(ConfigError):  # which `_workers` reports
        return worker_count(config, usable=len(machine.gpus))
    return max(1, config.distributed.workers)


def _cache(planned: "BasePlan") -> Iterator[Finding]:
    """The local sampler's cache. Raises ConfigError if no sequence fits."""
    from tinsmith.memory.budget import BLOCK

    cache, shape = planned.cache, planned.cache_shape
    if cache is None:
        return
    yield Finding(
        "  a cached token",
        "ok",
        f"{size_text(shape.block_bytes // BLOCK)}; the cache holds {cache.blocks * BLOCK:,} tokens",
    )
    if cache.slots:
        running = min(cache.places, planned.config.sampling.max_running)
        holds = f"the cache holds {cache.slots:,} states, {running:,} of them for sequences that run at once"
        detail = f"{size_text(shape.state_bytes)}; {holds}"
        yield Finding(
            "  a sequence's state",
            "ok",
            f"{detail}, which take {size_text(running * shape.state_bytes)} more during a pass",
        )


def _to_train(planned: "BasePlan") -> dict[str, int]:
    """Bytes that training takes beside the weights, by purpose."""
    training = planned.config.training
    if not training.trains:
        return {}
    again = f", {planned.recomputation.recompute} layers of it recomputed" if planned.recomputation.recompute else ""
    return {
        f"one trained model of rank {training.planned_rank}": planned.model.training,
        f"a pass of {training.tokens_per_pass:,} tokens (--tokens-per-pass), roughly{again}": planned.pass_bytes,
    }


def _full_training(known: "dict[str, Sizes]", left: int, config: Config) -> Iterator[Finding]:
    """Whether each base model's parameters can all be trained in `left` bytes."""
    from tinsmith.memory.budget import full_state  # here, because it imports transformers

    if not config.training.trains:
        yield Finding(
            "training", "note", "none (--train none): no memory is planned for it, and training operations are refused"
        )
        return
    for name, sizes in known.items():
        if sizes.expert_format is not None:
            continue  # they cannot be trained
        full = sizes.model(0, full_state(config.training))
        room: State = "ok" if full.training <= left else "note"
        detail = (
            f"{size_text(full.training)} a model, a snapshot {size_text(full.snapshot)}; "
            f"{_gib(max(left, 0))} left for it"
        )
        yield Finding(f"{name}, all parameters (rank 0)", room, detail if room == "ok" else f"does not fit: {detail}")


def _features(machine: Machine) -> Iterator[Finding]:
    fast = [gpu for gpu in machine.gpus if gpu.capability >= VARLEN_CAPABILITY]
    needs = f"a CUDA device of capability {VARLEN_CAPABILITY[0]}.{VARLEN_CAPABILITY[1]} or newer"
    yield Finding(
        "training and sampling on a GPU",
        "ok" if fast else "note",
        f"cuda:{fast[0].index}" if fast else f"needs {needs}",
    )
    yield Finding("images", "ok", "PNG and JPEG, with the model's own processor")
    for extra, modules in EXTRAS.items():
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        lacking = f"needs {', '.join(absent)}, which `{INSTALLERS[extra]}` installs"
        yield Finding(extra, "note" if absent else "ok", lacking if absent else "all there")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
