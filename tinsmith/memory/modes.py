"""The ways in which several GPUs may train one model, and the memory that each leaves. `tinsmith plan --workers N` prints them.

All numbers come from the budget of `base_plan.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith.config import Config
from tinsmith.memory.base_plan import DevicePlace, plan_base
from tinsmith.models.full import FullState
from tinsmith.models.read_decoder import KNOWN_TYPES
from tinsmith.models.sizing import Sizes

Mode = Literal["one GPU", "replicas", "sharded"]
"""Replicas hold whole base models; sharded workers hold a slice of every layer (--shard weights)."""


@dataclass(frozen=True)
class ModePlan:
    """One way of training, on each worker. Sizes are in bytes."""

    mode: Mode
    trains: str
    """An adapter, or all weights with their state."""
    settings: str
    """The settings of `tinsmith serve` that plan for it."""
    weight_bytes: int
    """The frozen base model."""
    model_bytes: int
    """One trained model: weights, gradients and what AdamW remembers."""
    cache_bytes: int
    """Size of the local sampler's cache; 0 without it."""
    longest_sequence: int
    """The longest sequence that trains on one worker, in tokens; 0 if none does."""
    longest_together: int
    """The longest that trains on all workers together, each of which computes a slice; where that is never done, the same."""
    fits: bool
    """Whether a full pass (--tokens-per-pass) of one sequence does, or one of the whole context, and what waits in host memory."""


def plan_modes(sizes: Sizes, place: DevicePlace, config: Config, rank: int, workers: int, others: Sequence[Sizes] = ()) -> list[ModePlan]:
    """All that may be trained on so many workers, as the server would with these settings: an adapter of that rank, and all weights.

    `others` are the base models that the same workers hold beside this one, each with a cache of its own.
    """
    whole: Mode = "replicas" if workers > 1 else "one GPU"
    replicated = dataclasses.replace(config, distributed=dataclasses.replace(config.distributed, shard="none"))
    modes = [_plan_mode(sizes, others, place, replicated, whole, workers, *training) for training in _trainings(rank, place.on_gpu)]
    if workers > 1 and all(can_be_sharded(each) for each in (sizes, *others)):  # --shard is one setting for all base models
        sampler = "vllm" if config.sampling.sampler == "vllm" else "none"  # no local one has all weights
        parts, *beside = (dataclasses.replace(each, parts=workers) for each in (sizes, *others))
        sampling = dataclasses.replace(config.sampling, sampler=sampler)
        settings = dataclasses.replace(config, sampling=sampling, distributed=dataclasses.replace(config.distributed, shard="weights"))
        ranks = (rank, 0) if rank else (0,)
        modes += [_plan_mode(parts, beside, place, settings, "sharded", workers, each, "float32") for each in ranks]
    return modes


def can_be_sharded(sizes: Sizes) -> bool:
    """Whether workers may shard the layers of the model (--shard weights)."""
    return sizes.layout.family.model_type in KNOWN_TYPES


def _trainings(rank: int, on_gpu: bool) -> Iterator[tuple[int, FullState]]:
    if rank:
        yield rank, "float32"
    yield 0, "float32"
    yield 0, "compact"
    if on_gpu:
        yield 0, "compact-host"


def _plan_mode(
    sizes: Sizes, others: Sequence[Sizes], place: DevicePlace, config: Config, mode: Mode, workers: int, rank: int, state: FullState
) -> ModePlan:
    training = dataclasses.replace(config.training, planned_rank=rank, full_state=state)
    planned = plan_base(sizes, others, place, dataclasses.replace(config, training=training), workers)
    longest = planned.longest
    trains = f"LoRA of rank {rank}" if rank else f"all weights, {state}"
    host_has_room = bool(rank) or sizes.full(state).host <= place.host_free
    return ModePlan(
        mode=mode,
        trains=trains,
        settings=f"--planned-rank {rank}"
        + ("" if rank else f" --full-state {state}")
        + (f" --shard weights --sampler {config.sampling.sampler}" if mode == "sharded" else ""),
        weight_bytes=sizes.weight_bytes,
        model_bytes=planned.model.training,
        cache_bytes=planned.budget.cache,
        longest_sequence=longest,
        longest_together=planned.together,
        fits=host_has_room and longest >= min(training.tokens_per_pass, sizes.max_context),
    )


def chosen(modes: list[ModePlan]) -> Iterator[tuple[str, str, str]]:
    """For each kind of training: what is trained, the mode that it is to have, and why."""
    for trains in dict.fromkeys(each.trains for each in modes):
        fitting = next((each for each in modes if each.trains == trains and each.fits), None)
        if fitting is None:
            yield trains, "none", "because it does not fit into the memory of one worker"
        else:
            what = "a part of each layer" if fitting.mode == "sharded" else "the whole"
            yield trains, fitting.mode, f"because {what} fits on each ({fitting.settings})"
