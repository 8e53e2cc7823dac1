"""`tinsmith plan`, typed as a person types it."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.bases import load
from tests.extent import slow
from tests.models.published import REFUSED, SERVED, write_architecture
from tinsmith.cli import app
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.memory.pass_memory import KEEP_ALL, Recomputation
from tinsmith.memory.sizing import Sizes, size_of
from tinsmith.models.files import EXPERT_MODELS

GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The configuration of Qwen3.5-4B."""
    return str(SERVED["Qwen/Qwen3.5-4B"].write(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def sized_once() -> Iterator[None]:
    """Lay out each model once: a large one takes a third of a second."""
    known: dict[tuple[str, str], Sizes] = {}

    def size(source: str, config: ModelsConfig) -> Sizes:
        file = Path(source) / "config.json"
        key = (file.read_text(), repr(config)) if file.is_file() else (source, repr(config))
        if key not in known:
            known[key] = size_of(source, config)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith.memory.plan.size_of", size)
        yield


def plan(*arguments: str, code: int = 0) -> str:
    """What the command prints."""
    ran = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "400"})
    assert (ran.exit_code, ran.stderr) == (code, ""), ran.output
    return ran.stdout


def planned(*arguments: str, code: int = 0) -> Any:
    """What it prints with --json."""
    return json.loads(plan(*arguments, "--json", code=code))


NAMES = [
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen3.6-35B-A3B",
    "openai/gpt-oss-20b",
]
"""Of each family one; the others have the same layers in other sizes."""


@pytest.mark.parametrize("name", [*NAMES, *slow(*(name for name in SERVED if name not in NAMES))])
def test_adapters_have_as_many_parameters_as_tinker_publishes(name: str, tmp_path: Path) -> None:
    directory = SERVED[name].write(tmp_path)
    assert [file.name for file in directory.iterdir()] == ["config.json"]
    assert planned(str(directory), "--rank", "1", "--memory-gib", "1000")["lora_parameters"] == SERVED[name].counts


@pytest.mark.parametrize(
    ("name", "too_little", "experts", "shared"),
    [
        ("Qwen/Qwen3-30B-A3B", "56", 48 * 3 * (2048 + 128 * 768), 0),
        ("Qwen/Qwen3.6-35B-A3B", "56", 40 * 3 * (2048 + 256 * 512), 40 * 3 * (2048 + 512)),
        ("openai/gpt-oss-20b", "40", 24 * 3 * (2880 + 32 * 2880), 0),
    ],
)
def test_of_experts_one_factor_is_shared_and_the_other_is_each_experts_own(
    name: str, too_little: str, experts: int, shared: int, tmp_path: Path
) -> None:
    """And what that takes of a GPU beside weights of 16 bits."""
    directory = str(SERVED[name].write(tmp_path))
    large, small = (planned(directory, "--memory-gib", gib, code=code) for gib, code in (("139", 0), (too_little, 1)))
    assert (large["rank"], large["lora_parameters"]["mlp"]) == (32, 32 * (experts + shared))
    assert large["weight_bytes"] == 2 * large["parameters"]
    # Masters and copies, sums of gradients and two moments; and of experts the gradients of a pass
    numbers = sum(large["lora_parameters"].values())
    assert large["adapters"]["snapshot_bytes"] == (4 + 2) * numbers
    assert large["adapters"]["bytes_each"] == (4 + 2 + 3 * 4) * numbers + 2 * 32 * experts
    assert (large["fits"], small["fits"]) == (True, False)


BITS = {"fp8": 8, "nf4": 4 + 16 / 64, "mxfp4": 4 + 8 / 32}
"""Of each number, with its share of scales but for those of FP8, of which each row has one."""


@pytest.mark.parametrize("name", BITS)
def test_a_mixture_that_no_80_gb_card_trains_fits_with_quantized_experts(name: str, tmp_path: Path) -> None:
    """Qwen3.6-35B-A3B with pictures, of which a rank of 32 alone takes 10 GiB."""
    directory = str(SERVED["Qwen/Qwen3.6-35B-A3B"].write(tmp_path))
    options = (directory, "--memory-gib", "74.5")
    whole = planned(*options, code=1)
    assert (whole["fits"], whole["advice"]) == (False, "--expert-dtype fp8")
    assert "none fits beside all of that, one does with --expert-dtype fp8; 10.4 GiB each" in plan(*options, code=1)
    small = planned(*options, "--expert-dtype", name)
    numbers, rows = 40 * 256 * 3 * 2048 * 512, 40 * 256 * (2 * 512 + 2048)
    held = numbers * BITS[name] / 8 + (4 * rows if name == "fp8" else 0)
    scratch = 256 * 2 * 512 * 2048  # gate and up of a layer
    assert small["weight_bytes"] == 2 * (small["parameters"] - numbers + scratch) + held
    assert (small["parameters"], small["adapters"]["bytes_each"]) == (
        whole["parameters"],
        whole["adapters"]["bytes_each"],
    )
    assert small["fits"]
    assert small["longest_sequence"]["tokens"] > 65_536
    assert (small["advice"], small["full_parameters"]) == (None, None)
    assert [each["trains"] for each in small["modes"]] == ["LoRA of rank 32"]
    report = plan(*options, "--expert-dtype", name)
    assert f"parameters in bfloat16, experts in {name}) on a GPU" in report
    assert "all parameters" not in report
    four = planned(*options, "--expert-dtype", name, "--workers", "4", "--sampler", "none")
    layers = size_of(directory, ModelsConfig(device="cpu")).layer_parameters
    (replicas, sharded), around = four["modes"], 2 * (small["parameters"] - sum(layers) + scratch)
    layers_held = [2 * layer - 2 * numbers // 40 + held / 40 for layer in layers]
    assert (replicas["weight_bytes"], four["weight_bytes"]) == (small["weight_bytes"], small["weight_bytes"])
    assert sharded["weight_bytes"] == around + sum(layers_held) / 4 + 2 * max(layers_held)


def test_training_of_all_parameters_is_not_planned_with_quantized_experts(family_dir: Callable[[str], Path]) -> None:
    options = ["plan", str(family_dir("qwen3_moe")), "--expert-dtype", "nf4"]
    ran = CliRunner().invoke(app, [*options, "--rank", "0"])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception).startswith("--rank 0 trains all parameters, and experts are not trained with")
    ran = CliRunner().invoke(app, ["serve", *options[2:], "--base-model", options[1], "--planned-rank", "0"])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception).startswith(
        "planned_rank=0 plans for training of all parameters, of which expert_dtype=nf4"
    )
    # Nor advised: that would not let all parameters train
    directory = str(family_dir("qwen3_moe"))
    assert planned(directory, "--rank", "0", "--memory-gib", "1.01", code=1)["advice"] is None


def test_they_follow_from_the_layers_of_the_model(model: str) -> None:
    """Of Qwen3.5-4B: 24 gated delta nets with 16 heads of queries and keys and 32 of values, 8 layers of attention with
    a gate.

    Only layers that attend keep keys and values; the others a state of fixed size.
    """
    delta_net = 3 * (2560 + 4096) + 2 * (2560 + 2048)  # v, z and out; q and k
    attention = (2560 + 8192) + 2 * (2560 + 1024) + (4096 + 2560)
    assert SERVED["Qwen/Qwen3.5-4B"].attn == 24 * delta_net + 8 * attention
    tree = planned(model, "--rank", "32", "--memory-gib", "80", "--kv-cache-gib", "8")
    assert tree["lora_parameters"]["attn"] == 32 * (24 * delta_net + 8 * attention)
    # Last inputs in bfloat16, the recurrent state in float32
    cache, state = tree["cache"], 24 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert cache["state_bytes"] == state
    of_tokens = cache["tokens"] * 8 * 2 * 4 * 256 * 2  # 8 layers, keys and values, 4 heads of 256 in bfloat16
    assert 0.99 * 8 * GIB < of_tokens + cache["state_slots"] * state <= 8 * GIB
    assert cache["tokens"] % cache["blocks"] == 0


@pytest.mark.parametrize("model_type", sorted(set(REFUSED.values()) - set(EXPERT_MODELS)))
def test_mixtures_of_experts_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["plan", str(write_architecture(model_type, tmp_path))])
    assert isinstance(ran.exception, ConfigError)
    assert f"'{model_type}' is a mixture of experts" in str(
        ran.exception
    ) or f"models of type '{model_type}' are" in str(ran.exception)


def test_what_fits_into_a_gpu_follows_from_its_memory(model: str) -> None:
    sizes = size_of(model, ModelsConfig(device="cpu", dtype="bfloat16"))
    large = planned(model, "--memory-gib", "80", "--kv-cache-gib", "40")
    assert (large["dtype"], large["memory_bytes"], large["weight_bytes"]) == (
        "bfloat16",
        80 * GIB,
        2 * large["parameters"],
    )
    assert large["cache"]["bytes"] == 40 * GIB
    left = 80 * GIB - large["weight_bytes"] - large["reserve_bytes"] - 40 * GIB
    passes, tokens, chunk = sizes.passes, large["pass_tokens"], TrainingConfig().logits_chunk
    beside = left - passes.bytes(tokens, chunk, passes.smallest)
    assert large["adapters"]["fit"] == beside // large["adapters"]["bytes_each"]
    full = large["full_parameters"]
    assert (full["state"], full["needed_bytes"], full["free_bytes"], full["fits"]) == (
        "float32",
        sizes.model(0).training,
        beside,
        False,
    )
    for_passes = int(0.95 * left) - large["adapters"]["bytes_each"]
    assert passes.smallest.recompute > large["recomputed_layers"] > 0
    for count, fits in ((large["recomputed_layers"], True), (large["recomputed_layers"] - 1, False)):
        assert (passes.bytes(tokens, chunk, Recomputation(count)) <= for_passes) == fits
    assert large["pass_bytes"] == passes.bytes(tokens, chunk, Recomputation(large["recomputed_layers"]))
    longest = large["longest_sequence"]
    assert longest["limit"] == "memory"
    taken, more = (passes.bytes(longest["tokens"] + one, chunk, passes.smallest_with_host) for one in (0, 1))
    assert taken <= for_passes < more

    huge = planned(model, "--memory-gib", "4000", "--kv-cache-gib", "2")
    for plan in (large, huge):
        assert plan["advertised_context"] == min(plan["longest_sequence"]["together"], plan["cache"]["tokens"])
    assert huge["advertised_context"] < 262_144
    assert planned(model, "--memory-gib", "80", "--sampler", "vllm")["advertised_context"] is None
    assert huge["full_parameters"]["fits"]
    assert huge["recomputed_layers"] == 0
    assert huge["longest_sequence"] == {"tokens": 262_144, "limit": "context", "together": 262_144}
    short = planned(model, "--memory-gib", "4000", "--max-context", "1000", "--workers", "2")["longest_sequence"]
    assert short == {"tokens": 1000, "limit": "context", "together": 1000}
    sharded = {
        workers: planned(model, "--memory-gib", "20", "--kv-cache-gib", "2", "--workers", str(workers))[
            "longest_sequence"
        ]
        for workers in (1, 2, 8)
    }
    assert sharded[1]["together"] < sharded[2]["together"] < sharded[8]["together"]
    assert all(each["together"] <= workers * each["tokens"] for workers, each in sharded.items())
    small = planned(model, "--memory-gib", "8", code=1)
    assert (small["fits"], small["adapters"]["fit"], small["longest_sequence"]["tokens"]) == (False, 0, 0)


def test_more_adapters_train_in_turns_with_those_that_wait_in_host_memory(model: str) -> None:
    """Of a host with as much memory as the GPU. One that comes back may have to wait for the largest to leave."""
    options = (model, "--memory-gib", "80", "--kv-cache-gib", "40")
    passes, chunk = size_of(model, ModelsConfig(device="cpu", dtype="bfloat16")).passes, TrainingConfig().logits_chunk

    def adapters(*more: str) -> tuple[int, int]:
        found = planned(*options, *more)["adapters"]
        return found["fit"], found["in_turns"]

    whole = planned(*options)
    left = 80 * GIB - whole["weight_bytes"] - whole["reserve_bytes"] - 40 * GIB
    room, each = left - passes.bytes(whole["pass_tokens"], chunk, passes.smallest), whole["adapters"]["bytes_each"]
    fit = room // each
    assert adapters() == (fit, (room + 20 * GIB) // each - 1)
    assert adapters("--paged-state-share", "0.5") == (fit, (room + 40 * GIB) // each - 1)
    assert adapters("--paged-state-share", "0") == (fit, fit)
    full = planned(model, "--memory-gib", "200", "--rank", "0")["adapters"]
    assert full["in_turns"] == full["fit"] > 0
    said = f"{fit:,} train at once beside all of that, {(room + 20 * GIB) // each - 1:,} in turns with those in host"
    assert said in plan(*options)


def test_a_cache_of_automatic_size_takes_what_training_leaves(model: str) -> None:
    sizes = size_of(model, ModelsConfig(device="cpu", dtype="bfloat16"))
    adapter, passes = sizes.model(32), sizes.passes
    plain, more_models, shared = (
        planned(model, "--memory-gib", "80", *more)
        for more in ([], ["--planned-models", "8"], ["--memory-share", "0.5"])
    )
    whole = passes.bytes(plain["pass_tokens"], TrainingConfig().logits_chunk, KEEP_ALL)
    beside = (
        80 * GIB
        - plain["weight_bytes"]
        - plain["reserve_bytes"]
        - 4 * adapter.training
        - min(8 * adapter.snapshot, 4 * GIB)
    )
    assert plain["cache"]["bytes"] == pytest.approx(beside - min(whole, beside / 2) / 0.95, abs=2)
    assert plain["adapters"]["fit"] >= 4
    assert more_models["adapters"]["fit"] >= 8
    assert more_models["cache"]["bytes"] < plain["cache"]["bytes"]
    assert shared["memory_bytes"] == 40 * GIB
    assert shared["cache"]["bytes"] < plain["cache"]["bytes"] / 2
    assert planned(model, "--memory-gib", "80", "--sampler", "none")["cache"] is None
    everything = planned(model, "--memory-gib", "200", "--rank", "0")
    assert everything["fits"]
    assert (
        everything["adapters"]["bytes_each"] == sizes.model(0).training == everything["full_parameters"]["needed_bytes"]
    )


def test_what_all_parameters_take_is_printed_by_part(model: str) -> None:
    """In GiB: 4.2 thousand million parameters in bfloat16."""
    count = size_of(model, ModelsConfig(device="cpu", dtype="bfloat16")).language_parameters
    options = [model, "--rank", "0", "--memory-gib", "80"]
    exact = plan(*options, "--kv-cache-gib", "1", code=1)
    assert "all parameters (rank 0)  does not fit" in exact
    compact = plan(*options, "--full-state", "compact")
    two = f"{2 * count / GIB:.1f} GiB"
    moments = f"{(2 + 8 / 256) * count / GIB:.1f} GiB"
    assert (
        f"weights {two} + rests of masters {two} + moments {moments} + gradients {two} + those of a pass {two} "
        "(--full-state compact)"
    ) in compact
    assert "all parameters (rank 0)  fits" in compact
    assert "models of rank 0         1 train at once" in compact
    host = plan(*options, "--full-state", "compact-host")
    assert (
        f"weights {two} + gradients {two} + those of a pass {two}; in host memory {(4 + 8 / 256) * count / GIB:.1f} GiB"
        in host
    )


def test_a_person_reads_both_numbers_of_what_does_not_fit_and_which_pass_would(model: str) -> None:
    options = [model, "--memory-gib", "80", "--rank", "1"]
    report, full = plan(*options), planned(*options)["full_parameters"]
    assert "attn 897,024 + mlp 1,130,496 + unembed 250,880 = 2,278,400 parameters" in report
    assert (
        f"does not fit: {full['needed_bytes'] / GIB:.1f} GiB needed, {full['free_bytes'] / GIB:.1f} GiB left" in report
    )
    assert "tokens train, then the memory ends" in report
    options = [model, "--memory-gib", "13", "--kv-cache-gib", "0.5"]
    advised = re.search(
        r"none fits beside all of that, one does with --tokens-per-pass (\d+); ", plan(*options, code=1)
    )
    assert advised is not None
    assert planned(*options, "--tokens-per-pass", advised[1])["adapters"]["fit"] == 1
    assert "none fits beside all of that; " in plan(*options[:2], "8", code=1)


def test_several_workers_have_a_row_for_each_way_to_train(model: str) -> None:
    alone, four = (planned(model, "--memory-gib", "80", "--workers", count) for count in ("1", "4"))
    assert [each["mode"] for each in alone["modes"]] == ["one GPU"] * 4
    assert [each["mode"] for each in four["modes"]] == ["replicas"] * 4 + ["sharded"] * 2
    assert (alone["workers"], four["workers"]) == (1, 4)
    same = {"cache", "adapters", "weight_bytes", "recomputed_layers"}
    # What a replica holds is what one GPU would
    assert {name: alone[name] for name in same} == {name: four[name] for name in same}
    assert four["longest_sequence"]["tokens"] == alone["longest_sequence"]["tokens"]
    states: list[list[str]] = [[], ["--full-state", "compact"], ["--full-state", "compact-host"]]
    for options, row in zip((["32"], *(["0", *state] for state in states)), four["modes"][:4], strict=True):
        whole = planned(model, "--memory-gib", "80", "--workers", "4", "--rank", *options, code=int(not row["fits"]))
        assert row["longest_sequence"] == whole["longest_sequence"]["tokens"]
        assert row["cache_bytes"] == whole["cache"]["bytes"]
        assert row["model_bytes"] == whole["adapters"]["bytes_each"]
    assert [row["fits"] for row in four["modes"]] == [True, False, True, True, True, True]

    report = plan(model, "--memory-gib", "80", "--workers", "4")
    assert "LoRA of rank 32: replicas, because the whole fits on each (--planned-rank 32)" in report
    every = "--planned-rank 0 --full-state float32 --shard weights --sampler none"
    assert f"all weights, float32: sharded, because a part of each layer fits on each ({every})" in report
    assert (
        "all weights, compact: replicas, because the whole fits on each (--planned-rank 0 --full-state compact)"
        in report
    )
    assert "on each of" not in plan(model, "--memory-gib", "80")


def test_workers_that_divide_the_weights_have_more_room(tmp_path: Path) -> None:
    """They need no more to start: layers come to the device one at a time."""
    directory = str(SERVED["Qwen/Qwen3-8B"].write(tmp_path))
    options = ["--workers", "4", "--sampler", "none"]
    sizes = size_of(directory, ModelsConfig(device="cpu", dtype="bfloat16"))
    layers, largest = 2 * sum(sizes.layer_parameters), 2 * max(sizes.layer_parameters)
    held = 2 * sizes.parameters - layers + layers // 4 + 2 * largest
    # The base alone takes 15.3 GiB; of 20 GiB replicas have nothing left for a pass.
    for memory, fits in (("20", True), ("14", True), ("8", False)):
        whole, parts = (
            planned(directory, "--memory-gib", memory, *options, *more, code=code)
            for more, code in (([], 1), (["--shard", "weights"], 0 if fits else 1))
        )
        assert (whole["fits"], parts["fits"]) == (False, fits)
        assert (whole["weight_bytes"], parts["weight_bytes"]) == (2 * sizes.parameters, held)
        full = parts["full_parameters"]
        assert full["needed_bytes"] == parts["modes"][-1]["model_bytes"] < whole["full_parameters"]["needed_bytes"] / 3
        assert [row["mode"] for row in whole["modes"]] == [row["mode"] for row in parts["modes"]]
        row = parts["modes"][-2]
        assert (row["mode"], row["weight_bytes"], row["longest_sequence"]) == (
            "sharded",
            held,
            parts["longest_sequence"]["tokens"],
        )
        assert row["settings"] == "--planned-rank 32 --shard weights --sampler none"
    report = plan(directory, "--memory-gib", "20", *options, "--shard", "weights")
    assert f"LoRA of rank 32: sharded, because a part of each layer fits on each ({row['settings']})" in report
    assert "all parameters (rank 0)  does not fit" in report


DIVIDED = ["--workers", "2", "--memory-gib", "80", "--shard", "weights"]


def test_workers_that_a_server_would_refuse_are_not_planned(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, mixture = (str(family_dir(family)) for family in ("qwen3", "qwen3_moe"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ran = CliRunner().invoke(app, ["plan", mixture, "--sampler", "vllm"])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception).startswith(f"--sampler vllm: {mixture} (qwen3_moe) is a mixture of experts")
    for options, refused in (
        (["--workers", "2"], "--workers 2: there are 1 GPUs"),
        (["--workers", "2", "--sampler", "vllm"], "--workers 2: there are 1 GPUs"),
        (["--shard", "weights"], "--shard weights divides weights over several workers"),
        (DIVIDED, "--shard weights and --sampler local"),
        ([*DIVIDED, "--sampler", "none", "--full-state", "compact"], "--shard weights and --full-state compact"),
    ):
        ran = CliRunner().invoke(app, ["plan", directory, *options])
        assert isinstance(ran.exception, ConfigError)
        assert str(ran.exception).startswith(refused)
    elsewhere = ["--memory-gib", "80", "--sampler", "vllm"]  # GPUs that need not be here
    assert [planned(directory, *elsewhere, *more)["workers"] for more in ([], ["--workers", "3"])] == [1, 3]
    sharded = planned(directory, *elsewhere, "--workers", "3", "--shard", "weights")
    assert {row["settings"] for row in sharded["modes"] if row["mode"] == "sharded"} == {
        "--planned-rank 32 --shard weights --sampler vllm",
        "--planned-rank 0 --full-state float32 --shard weights --sampler vllm",
    }


def test_without_a_memory_it_is_this_machine(family_dir: Callable[[str], Path]) -> None:
    tree = planned(str(family_dir("qwen3_5")), "--dtype", "float32")
    network = load(family_dir("qwen3_5"), device="cpu").network
    assert tree["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert tree["memory_bytes"] > tree["weight_bytes"] == 4 * tree["parameters"]
    assert tree["fits"]
