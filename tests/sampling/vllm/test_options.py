"""What may be passed on to vLLM, and what we read of it."""

import pytest

from tests.preloaded import REAL_PYTHON
from tinsmith.config import load
from tinsmith.errors import ConfigError
from tinsmith.sampling.vllm.options import check_options, require_vllm, share_of, value_of


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--tensor-parallel-size=2"],
            r"--vllm-arg=--tensor-parallel-size=2 .* cannot work: Tinsmith must know it .*: use --vllm-tensor-parallel",
        ),
        (["--tensor_parallel_size", "2"], "use --vllm-tensor-parallel"),
        (["--tensor-par=2"], r"--vllm-arg=--tensor-par=2 \(--tensor-parallel-size\)"),
        (["-tp", "2"], "use --vllm-tensor-parallel"),
        (["--max-loras=8", "-pp=2"], "start more servers with --vllm-servers"),
        (["--data-parallel-size-local", "4"], "start more servers with --vllm-servers"),
        (["--data-parallel-hybrid-lb"], "start more servers with --vllm-servers"),
        (["-dcp=2"], "start more servers with --vllm-servers"),
        (["--distributed-executor-backend=ray"], "vLLM chooses it, and for several GPUs Tinsmith does"),
        (["--fully-sharded-loras"], "what a process holds of an adapter is not compared then"),
        (["--nnodes=2"], "start more servers with --vllm-servers"),
        (["--device-ids=0,1"], "start more servers with --vllm-servers"),
        (["--enable-expert-parallel"], "start more servers with --vllm-servers"),
        (["--api-server-count=2"], "adapters are given to one process"),
        (["--config=vllm.yaml"], "pass its options one by one"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_options(options)


def test_it_is_refused_before_models_are_loaded() -> None:
    config = load(options={"sampler": "vllm", "vllm_python": REAL_PYTHON, "vllm_args": ["--tensor-parallel-size=2"]})
    with pytest.raises(ConfigError, match="use --vllm-tensor-parallel"):
        require_vllm(config)


def test_servers_of_a_server_that_only_samples_take_no_more_than_its_share() -> None:
    """It shares its GPUs with another server, which trains there for instance."""
    options = {"sampler": "vllm", "train": "none", "vllm_python": REAL_PYTHON}
    for share, taken in ((0.4, 0.4), (1, 0.92), (1, 1)):
        require_vllm(load(options=options | {"memory_share": share, "vllm_args": [f"--gpu-memory-utilization={taken}"]}))
    require_vllm(load(options=options | {"train": "any", "memory_share": 0.4}))  # that is the trainer's part of it, beside its own servers
    refused = load(options=options | {"memory_share": 0.4, "vllm_args": ["--gpu-memory-utilization=0.5"]})
    with pytest.raises(
        ConfigError, match=r"--memory-share 0.4 .* they would take 0.5; add --vllm-arg=--gpu-memory-utilization=0.4 or less"
    ):
        require_vllm(refused)


@pytest.mark.parametrize(
    "options", [["--tensor-parallel-size=1"], ["-tp", "1"], ["--max-loras=8", "--config-format=auto"], ["--gpu-memory-utilization=0.4"]]
)
def test_the_rest_is_passed_on(options: list[str]) -> None:
    check_options(options)


def test_the_last_value_counts_however_it_is_written() -> None:
    assert value_of(["--max_model_len", "9", "--seed=1", "--max-model-len=8K"], "--max-model-len") == "8K"
    assert value_of(["--enforce-eager", "--seed=1"], "--enforce-eager") is None
    assert share_of([]) == 0.92
    assert share_of(["--gpu-memory-utilization", "0.4"]) == 0.4
    for wrong in ("2", "half", "0"):
        with pytest.raises(ConfigError, match=f"utilization={wrong}: give the part"):
            share_of([f"--gpu-memory-utilization={wrong}"])
