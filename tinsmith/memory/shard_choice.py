"""Resolves `--shard auto`: whether workers shard the layers of the base models.

The estimate is that of `tinsmith plan --workers N` with all base models on each worker. It needs PyTorch, which the
server does not load, so `python -m tinsmith.memory.shard_choice` makes it in a process of its own, from the
configuration as JSON on standard input.
"""

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.config import Config, base_model_sources, from_tree, to_tree
from tinsmith.errors import ConfigError
from tinsmith.protocol.devices import visible_gpus, worker_count

log = logging.getLogger(__name__)

ESTIMATE_S = 300.0
"""Most of it is for importing PyTorch."""


@dataclass(frozen=True)
class Fit:
    """Room for one base model beside all others, with the planned training (--planned-rank)."""

    name: str
    loads: bool
    """Whether all layers of all base models fit into each worker at all."""
    whole: bool
    """Whether it trains with all layers on each worker."""
    sharded: bool
    """Whether it trains with a slice of each layer on each worker."""


def chosen_shard(config: Config, workers: int) -> str:
    """Resolve `shard` to none or weights. Raises ConfigError as `choose`.

    Without an estimate nothing is sharded: a base model without room is refused when it is loaded.
    """
    asked = config.distributed.shard
    if asked != "auto":
        return asked
    if workers == 1 or config.distributed.ray_address or config.models.device == "cpu" or not visible_gpus():
        return "none"
    program = [sys.executable, "-P", "-m", "tinsmith.memory.shard_choice"]
    try:
        done = subprocess.run(
            program, input=json.dumps(to_tree(config)), capture_output=True, text=True, check=True, timeout=ESTIMATE_S
        )
        fits = [Fit(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        log.warning(
            "what fits into the GPUs could not be estimated, so nothing is sharded (--shard none): %s",
            said[-1] if said else error,
        )
        return "none"
    return choose(fits, config)


def choose(fits: Sequence[Fit], config: Config) -> str:
    """Return weights if a base model trains only with sharded layers, else none.

    Raises ConfigError for a model that does not load as a whole, with the local sampler, which takes no sharded layers.
    """
    lacking = [fit for fit in fits if not fit.whole]
    if not lacking or not all(fit.sharded for fit in fits):
        return "none"
    training = config.training
    if training.full_state != "float32" or training.sequence_parallel_from or config.models.deterministic:
        return "none"
    if config.sampling.sampler == "local":
        larger = [fit.name for fit in lacking if not fit.loads]
        remedy = "add --sampler vllm, with GPUs for it, or --sampler none; `tinsmith plan --workers` says what fits"
        if larger:
            are, them = ("is", "it") if len(larger) == 1 else ("together are", "them")
            raise ConfigError(
                f"{' and '.join(larger)} {are} too large for the GPU of a worker, and the local sampler takes no "
                f"layers that are sharded over the workers: {remedy}, and --shard none loads {them} nevertheless"
            )
        log.warning(
            "%s has little room to train as a whole on each GPU. To divide its layers, %s", lacking[0].name, remedy
        )
        return "none"
    return "weights"


def estimated(config: Config) -> list[Fit]:
    """Estimate what fits into this machine's GPUs, with as many workers as the engine will start."""
    from tinsmith.memory.plan import place_here, plan_modes  # these import torch
    from tinsmith.memory.sizing import beside_weights, size_of
    from tinsmith.models.machine import look_around, usable_gpus

    workers = worker_count(config, usable=usable_gpus())
    bases = {name: size_of(source, config.models) for name, source in base_model_sources(config).items()}
    place = place_here(next(iter(bases.values())), look_around(), config, workers)
    loads = beside_weights(place.free - place.reserve, bases.values(), config) > 0
    rank, found = config.training.planned_rank, []
    trains = f"LoRA of rank {rank}" if rank else "all weights, float32"
    for name, sizes in bases.items():
        others = [other for each, other in bases.items() if each != name]
        modes = {
            each.mode: each.fits
            for each in plan_modes(sizes, place, config, rank, workers, others)
            if each.trains == trains
        }
        found.append(Fit(name, loads, whole=modes.get("replicas", True), sharded=modes.get("sharded", False)))
    return found


def main() -> None:
    """Print the estimate as JSON."""
    fits = estimated(from_tree(json.loads(sys.stdin.read())))
    print(json.dumps([dataclasses.asdict(fit) for fit in fits]))


if __name__ == "__main__":
    main()
