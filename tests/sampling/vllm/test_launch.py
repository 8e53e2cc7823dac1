"""Which GPUs a server gets, how full weights get there, and how long a sequence fits, from configurations alone."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig

from tinsmith.config import Config, load
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, loading_of
from tinsmith.models.families import empty_network
from tinsmith.models.layout import layout_of
from tinsmith.sampling.vllm import launch as room
from tinsmith.sampling.vllm.launch import (
    ServedSizes,
    check_divisible,
    divided,
    gpus_of,
    launches,
    longest_sequence,
    sizes_of,
    transfer_kind,
)
from tinsmith.training.parallel.process_group import LOOPBACK

GIB = 2**30
CONTEXT = 262_144
SHARE = "--gpu-memory-utilization=0.4"
FIRST = torch.device("cuda:0")
TWO_GPUS_EACH = {"vllm_servers": 2, "vllm_tensor_parallel": 2}


def config_of(*vllm: str, **options: Any) -> Config:
    return load(options={"base_models": ["a=x/a"], "vllm_args": list(vllm), **options})


@pytest.mark.parametrize(
    ("settings", "trainer", "gpus", "expected"),
    [
        # Behind the trainer's, and at last on it.
        ({}, "cuda:0", 1, [[(0,)]]),
        ({"vllm_servers": 4}, "cuda:0", 4, [[(1,), (2,), (3,), (0,)]]),
        ({"vllm_servers": 3}, "cuda:2", 3, [[(0,), (1,), (2,)]]),
        ({"vllm_servers": 2}, "cpu", 0, [[(), ()]]),
        # Those of two base models are on different ones,
        ({"vllm_servers": 2}, "cuda:0", 8, [[(1,), (2,)], [(3,), (4,)]]),
        ({"vllm_servers": 2}, "cuda:0", 4, [[(1,), (2,)], [(3,), (0,)]]),
        # but where one has room for both; those that take turns with the trainer are on its own.
        ({"vllm_args": ["--gpu_memory_utilization", "0.3"]}, "cuda:0", 1, [[(0,)], [(0,)]]),
        ({"vllm_args": [SHARE], "vllm_turn_s": 10.0}, "cuda:1", 8, [[(1,)], [(1,)]]),
        # Servers of two GPUs share none.
        (TWO_GPUS_EACH, "cuda:0", 9, [[(1, 2), (3, 4)], [(5, 6), (7, 8)]]),
        (TWO_GPUS_EACH, "cuda:7", 9, [[(8, 0), (1, 2)], [(3, 4), (5, 6)]]),
        (TWO_GPUS_EACH, "cpu", 0, [[(), ()], [(), ()]]),
        # Without a trainer they begin at the first.
        ({"vllm_servers": 2, "train": "none"}, "cuda:0", 4, [[(0,), (1,)], [(2,), (3,)]]),
        (TWO_GPUS_EACH | {"train": "none"}, "cuda:0", 8, [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]),
        # They are behind all workers.
        ({"workers": 2, "vllm_servers": 2}, "cuda:0", 8, [[(2,), (3,)], [(4,), (5,)]]),
        ({"workers": 3, "vllm_tensor_parallel": 2}, "cuda:0", 8, [[(3, 4)], [(5, 6)]]),
        ({"workers": 6}, "cuda:0", 8, [[(6,)], [(7,)]]),
    ],
)
def test_servers_get_gpus_of_their_own(
    settings: dict[str, Any], trainer: str, gpus: int, expected: list[list[tuple[int, ...]]]
) -> None:
    names = "ab"[: len(expected)]
    config = load(options={"base_models": [f"{name}=x/{name}" for name in names], **settings})
    assert [gpus_of(name, config, torch.device(trainer), gpus) for name in names] == expected


@pytest.mark.parametrize(
    ("settings", "trainer", "gpus", "reason"),
    [
        ({}, "cuda:0", 1, r"on 1 GPUs: 2 would share GPU 0, and each takes 0.92 of .*utilization=0.45"),
        ({"vllm_turn_s": 10.0}, "cuda:1", 8, "2 would share GPU 1"),
        (
            TWO_GPUS_EACH,
            "cuda:0",
            8,
            r"for 2 base models, of 2 GPUs each .*, and one GPU for the trainer are 9 GPUs; there are 8",
        ),
        (
            TWO_GPUS_EACH | {"train": "none"},
            "cuda:0",
            3,
            r"of 2 GPUs each \(--vllm-tensor-parallel\) are 8 GPUs; there are 3",
        ),
        ({"workers": 6}, "cuda:0", 7, "and 6 GPUs for the workers are 8 GPUs; there are 7"),
    ],
)
def test_servers_without_room_are_refused(settings: dict[str, Any], trainer: str, gpus: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gpus_of("a", load(options={"base_models": ["a=x/a", "b=x/b"], **settings}), torch.device(trainer), gpus)


@pytest.mark.parametrize(
    ("wanted", "trainer", "gpus", "ranks", "kind"),
    [
        *[(wanted, "cpu", (), ranks, wanted) for wanted in ("file", "broadcast") for ranks in (1, 2)],
        # Without a trainer weights come from the host's memory
        *[("auto", "cpu", gpus, 2, "file") for gpus in ((0,), (), (1, 2))],
        ("auto", "cuda:1", (1,), 1, "ipc"),
        ("auto", "cuda:0", (1,), 1, "broadcast"),
        *[
            (wanted, "cuda:0", (1, 2), 2, kind)
            for wanted, kind in (("auto", "broadcast"), ("broadcast", "broadcast"), ("file", "file"))
        ],
    ],
)
def test_full_weights_get_to_a_server(wanted: str, trainer: str, gpus: tuple[int, ...], ranks: int, kind: str) -> None:
    assert transfer_kind(wanted, torch.device(trainer), gpus, ranks) == kind


@pytest.mark.parametrize(
    ("wanted", "trainer", "gpus", "reason"),
    [
        ("ipc", "cpu", (), "the server has no GPU"),
        ("ipc", "cuda:0", (1,), "vllm_transfer=ipc .*the server has GPU 1"),
        ("broadcast", "cuda:1", (1,), "one shares the trainer's"),
        (
            "ipc",
            "cuda:0",
            (1, 2),
            "vllm_transfer=ipc reaches one GPU of a server, and --vllm-tensor-parallel 2 gives it more",
        ),
        *[
            (wanted, "cpu", (0,), f"vllm_transfer={wanted} begins at a GPU; weights come from")
            for wanted in ("ipc", "broadcast")
        ],
    ],
)
def test_a_way_that_does_not_exist_is_refused(wanted: str, trainer: str, gpus: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        transfer_kind(wanted, torch.device(trainer), gpus, max(len(gpus), 1))


def test_a_server_finds_its_gpu_and_what_servers_say_to_each_other_stays_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among the GPUs that the first worker sees.

    Unless the user names a network interface; NCCL uses no multicast, as the trainer.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    config = config_of(workers=2)
    (gpus,) = gpus_of("a", config, FIRST, 4)
    expected = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_SOCKET_IFNAME": f"={LOOPBACK}", "GLOO_SOCKET_IFNAME": "eth7"}
    expected |= {"NCCL_NVLS_ENABLE": "0", "PYTHONSAFEPATH": "1"}
    assert expected.items() <= room._environment(config, Path("sockets"), gpus).items()


def test_each_gpu_holds_its_part_and_what_cannot_be_divided_is_refused(
    text_base: BaseModel, hybrid_base: BaseModel
) -> None:
    """Heads of keys and values that are fewer than GPUs are on several."""
    whole = ServedSizes(weights=1000, cache_per_token=64, state=0, per_lora_rank=10)
    assert divided(whole, 1, 8) == whole
    assert divided(whole, 4, 8) == ServedSizes(250, 16, 0, 10)
    assert divided(whole, 4, 2) == ServedSizes(250, 32, 0, 10)
    heads = text_base.text_config.num_attention_heads
    check_divisible(text_base, heads)
    check_divisible(hybrid_base, 1)
    with pytest.raises(
        ConfigError, match=f"--vllm-tensor-parallel {heads + 1} does not divide the {heads} attention heads of tiny"
    ):
        check_divisible(text_base, heads + 1)
    with pytest.raises(ConfigError, match="has gated delta nets, with which --vllm-tensor-parallel 2 was not tested"):
        check_divisible(hybrid_base, 2)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_worker_that_only_compares_loads_into_the_hosts_memory_in_the_precision_of_the_servers(dtype: str) -> None:
    for sampler, train, compares in (("vllm", "any", False), ("vllm", "none", True), ("local", "none", False)):
        config = load(options={"device": "cpu", "sampler": "vllm", "dtype": dtype})
        config.sampling.sampler, config.training.train = sampler, train
        loading = loading_of(config)
        assert (loading is not config.models) == compares
        assert not compares or (loading.device, loading.dtype) == ("cpu", "float32" if dtype == "auto" else dtype)


def test_a_server_is_asked_for_logprobs_at_the_temperature_that_samples_have(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Without the option vLLM answers those of temperature 1."""
    (launch,), _ = launches(text_base, config_of(device="cpu", data_dir=str(tmp_path)), tmp_path)
    assert launch.command[launch.command.index("--logprobs-mode") + 1] == "processed_logprobs"


# How long a sequence fits


def longest(base: BaseModel, gpus: tuple[int, ...], *vllm: str, **options: Any) -> int:
    return longest_sequence(base, config_of(*vllm, **options), gpus)


def test_what_fits_into_a_share_is_said(
    qwen3_vl_8b: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a GPU, with the share that docs/how-to/vllm.md names.

    Of two GPUs each has half of the weights, and of the heads of keys and values.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    with caplog.at_level(logging.INFO):
        assert longest(qwen3_vl_8b, (0,), SHARE) == 38_912
    said = "vLLM servers of tiny take sequences of up to 38912 of 262144 tokens: more do not fit into 32.0 GiB of a GPU"
    assert said in caplog.text
    assert longest(qwen3_vl_8b, (1, 2), SHARE, vllm_tensor_parallel=2) > 2 * 38_912
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GIB))
    with pytest.raises(
        ConfigError, match=r"has 9.6 GiB of a GPU .* with 16.3 GiB of weights .*: no sequence of 1024 tokens fits in"
    ):
        longest(qwen3_vl_8b, (0,), SHARE)


def test_a_length_that_is_passed_on_counts(qwen3_vl_8b: BaseModel) -> None:
    """Requests are refused by it, not by vLLM."""
    for passed, tokens in (
        ("--max-model-len=4096", 4096),
        ("--max_model_len=32K", 32768),
        ("--max-model-len=8k", 8000),
    ):
        assert longest(qwen3_vl_8b, (0,), passed) == tokens
    for wrong in ("auto", "-1", "300K"):
        with pytest.raises(ConfigError, match="give a number of tokens from 1 to the model's context of 262144"):
            longest(qwen3_vl_8b, (0,), f"--max-model-len={wrong}")


def test_a_cpu_server_has_a_cache_and_delta_nets_a_state(
    qwen3_vl_8b: BaseModel, text_base: BaseModel, hybrid_base: BaseModel
) -> None:
    """Of four layers one attends, with 2 heads of 32; the others have 128 channels before 3 taps and 4 heads of 16 by
    16."""
    assert longest(qwen3_vl_8b, (), kv_cache_gib=2.0) == 14_336
    assert longest(text_base, ()) == text_base.max_context
    sizes = sizes_of(hybrid_base.layout.layers, 0, 0, torch.float32)
    assert (sizes.cache_per_token, sizes.state) == (2 * 2 * 32 * 4, 3 * 4 * (3 * 128 + 4 * 16 * 16))


@pytest.fixture(scope="module")
def qwen3_vl_8b(vision_base: BaseModel) -> BaseModel:
    """Qwen3-VL-8B without its weights."""
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    text |= {"num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": CONTEXT}
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    network = empty_network(vision_base.name, vision_base.family, config)
    assert sum(p.numel() for p in network.parameters()) == 8_767_123_696
    layout, head = layout_of("qwen", vision_base.family, network), network.lm_head.weight
    return replace(
        vision_base,
        config=config,
        network=network,
        layout=layout,
        lm_head=head,
        max_context=CONTEXT,
        dtype=torch.bfloat16,
    )
