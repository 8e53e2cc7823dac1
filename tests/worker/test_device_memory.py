"""What the worker makes of the memory of its device, and that `tinsmith plan` says the same.

Invariant: Plan and server say the same of how long a sequence trains and what the cache holds, on one worker and on
several that share a host. Also: `tests/distributed/test_all_reduce.py`, `tests/commands/test_plan.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.bases import load
from tests.models.published import SERVED
from tinsmith.config import Config, ModelsConfig, SamplingConfig, TrainingConfig
from tinsmith.memory.budget import BLOCK, CPU_CACHE, ModelBytes, divide_memory
from tinsmith.memory.plan import BasePlan, DevicePlace, make_plan, plan_modes
from tinsmith.memory.sizing import beside_weights, loaded_sizes, size_of
from tinsmith.models.base import BaseModel
from tinsmith.models.machine import Machine
from tinsmith.protocol.facts import advertised_context
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.worker.device_memory import DeviceMemory

MIB = 2**20


@pytest.mark.parametrize(
    ("family", "little"), [("qwen3", 15), ("qwen3_5", 15), ("qwen3_moe", 21), ("qwen3_5_moe", 35), ("gpt_oss", 35)]
)
@pytest.mark.parametrize("plenty", [False, True])
def test_plan_and_server_agree(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, little: int, plenty: bool
) -> None:
    """On a machine with `little` MiB of free memory beside the weights, and on one with plenty."""
    mib = 4000 if plenty else little
    directory = str(family_dir(family))
    models = ModelsConfig(device="cpu", dtype="float32", max_context=1024)
    sampling, training = SamplingConfig(kv_cache_gib=8 / 1024), TrainingConfig(logits_chunk=64)
    config = Config(base_models=[f"tiny={directory}"], models=models, sampling=sampling, training=training)
    base = load(family_dir(family), device="cpu", max_context=1024)
    weights = sum(parameter.nbytes for parameter in base.network.parameters())
    monkeypatch.setattr("tinsmith.worker.device_memory.free_memory", lambda device: mib * MIB)
    monkeypatch.setattr(
        "tinsmith.memory.plan.look_around", partial(Machine, 1, 2**40, mib * MIB + weights, [], "there is none")
    )
    planned = make_plan(config, training.planned_rank, None)
    memory = DeviceMemory({"tiny": base}, config)
    longest = memory.longest_trained("tiny")
    assert planned.longest_sequence.tokens == longest
    assert (longest == 1024) == plenty
    assert longest > 0
    assert planned.cache is not None
    sampler = LocalSampler(base, sampling, 64, memory.cache_sizes("tiny"))
    assert planned.cache.tokens == sampler.cache.total * BLOCK
    assert sampler.longest == min(1024, planned.cache.tokens)
    assert planned.advertised_context == advertised_context(longest, sampler.longest)
    loaded, read = loaded_sizes(base, 1), size_of(directory, models)
    assert loaded.parameters == read.parameters
    assert (loaded.language_parameters, loaded.layer_parameters) == (read.language_parameters, read.layer_parameters)


def test_plan_and_server_agree_on_what_two_base_models_leave_each_other(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    families = ("qwen3", "qwen3_5")
    models = ModelsConfig(device="cpu", dtype="float32", max_context=1024)
    config = Config(
        models=models, sampling=SamplingConfig(kv_cache_gib=8 / 1024), training=TrainingConfig(logits_chunk=64)
    )
    bases = {family: load(family_dir(family), device="cpu", max_context=1024) for family in families}
    sizes = {family: size_of(str(family_dir(family)), models) for family in families}
    weights = sum(parameter.nbytes for base in bases.values() for parameter in base.network.parameters())
    monkeypatch.setattr("tinsmith.worker.device_memory.free_memory", lambda device: 25 * MIB)
    memory = DeviceMemory(bases, config)
    for family, other in (families, families[::-1]):
        place = DevicePlace("", on_gpu=False, free=25 * MIB + weights, total=2**40, host_free=25 * MIB)
        beside, alone = (plan_modes(sizes[family], place, config, 32, 1, others)[0] for others in ([sizes[other]], []))
        assert beside.cache_bytes == memory.plans[family].budget.cache
        assert 0 < beside.longest_sequence == memory.longest_trained(family) < alone.longest_sequence


def test_a_server_that_only_samples_plans_nothing_for_training(text_base: BaseModel) -> None:
    """The cache of a GPU gets what is left beside sampled weights and pieces of prompts: more than beside training."""
    sizes = size_of(text_base.tokenizer_id, ModelsConfig(device="cpu", dtype="float32"))
    caches, free, model = {}, 80 * 2**30, ModelBytes(training=10 * 2**30, snapshot=2**30)
    for train in ("any", "none"):
        config = Config(training=TrainingConfig(train=train, planned_rank=0))
        budget = divide_memory(free, 1, model, sizes.passes, config, on_gpu=True)
        caches[train] = budget.cache
        assert (budget.passes == 0) == (train == "none")
        assert budget.cache < free - (4 * 2**30 if train == "none" else 0)
        fixed = Config(training=config.training, sampling=SamplingConfig(kv_cache_gib=2))
        assert divide_memory(free, 1, model, sizes.passes, fixed, on_gpu=True).cache == 2 * 2**30
    assert caches["none"] > caches["any"]
    memory = DeviceMemory({"tiny": text_base}, Config(training=TrainingConfig(train="none")))
    assert memory.longest_trained("tiny") == 0
    assert memory.plans["tiny"].budget.cache == CPU_CACHE


def test_what_a_model_keeps_in_host_memory_is_not_planned_for_inputs_too(tmp_path: Path) -> None:
    """Both wait there: what AdamW remembers of a compact-host model, and inputs of recomputed layers."""
    directory = str(SERVED["Qwen/Qwen3-8B"].write(tmp_path))
    sizes = size_of(directory, ModelsConfig(device="cpu", dtype="bfloat16"))
    model, config = (
        sizes.model(0, "compact-host"),
        Config(training=TrainingConfig(planned_rank=0, full_state="compact-host")),
    )
    assert model.host == sizes.full("compact-host").host > 2**34
    budget = divide_memory(beside_weights(80 * 2**30, [sizes], config), 1, model, sizes.passes, config, on_gpu=True)
    sizes = replace(sizes, max_context=2**20)

    def longest(host: int) -> int:
        place = DevicePlace("", on_gpu=True, free=80 * 2**30, total=80 * 2**30, host_free=host)
        return BasePlan(sizes, place, config, 1, model, sizes.passes, budget).longest

    assert longest(model.host) == longest(0) < longest(model.host + 2**34) < longest(model.host + 2**35)
