"""A run of `tinsmith rl` whose episodes vLLM samples: nothing of its configuration is about vLLM."""

from pathlib import Path

from tests.rl.test_run import QUIET, config_of, logged, told
from tests.running import Server
from tinsmith.rl.trainer import train


def test_a_run_trains_on_what_vllm_samples(server: Server, socket: str, tmp_path: Path) -> None:
    """`tests/rl` has the same with the local sampler."""
    assert socket
    config = config_of(server.url, tmp_path, model={"base_model": "tiny"}, evaluation={"every": 4, "prompts": 48})
    assert train(config, QUIET).step == 4
    before, *lines = logged(tmp_path)
    assert before["eval/reward"] > 0.1
    for line in lines:
        assert 0.0 <= line["kl_sampler_trainer"] < 1e-6
        assert line["dropped"] == 0.0
    assert sum(line["optimizer_steps"] for line in lines) > 0.0
    for trajectory in told(tmp_path, 4):
        (sample,) = trajectory["samples"]
        assert len(sample["pictures"]) == trajectory["turns"]
        assert [bool(logprob) for logprob in sample["logprobs"]] == [bool(mask) for mask in sample["loss_mask"]]
