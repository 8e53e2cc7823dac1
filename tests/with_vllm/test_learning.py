"""A run of `tinsmith rl` whose episodes vLLM samples: nothing of its configuration changes but the server's address."""

from pathlib import Path

import pytest

from tests.rl.test_run import QUIET, config_of, logged, told
from tests.running import Server, serving
from tinsmith.rl.config import to_tree
from tinsmith.rl.trainer import train


def test_one_configuration_trains_with_either_sampler(server: Server, socket: str, vision_dir: Path, tmp_path: Path) -> None:
    assert socket
    lines, trees = {}, {}
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "server", "--base-model", f"tiny={vision_dir}", "--kv-cache-gib", "0.1") as local:
        local.wait_for_health()
        urls = {"local": local.url, "vllm": server.url}
        for name, url in urls.items():
            evaluation = {"every": 4, "prompts": 48}
            config = config_of(url, tmp_path / name, model={"base_model": "tiny"}, evaluation=evaluation)
            assert train(config, QUIET).step == 4
            lines[name], trees[name] = logged(tmp_path / name), to_tree(config)
    assert [tree["server"].pop("url") for tree in trees.values()] == list(urls.values())
    assert [tree["output"].pop("directory") for tree in trees.values()] == [str(tmp_path / name) for name in trees]
    assert trees["local"] == trees["vllm"]
    before = {name: run[0]["eval/reward"] for name, run in lines.items()}
    assert before["vllm"] == pytest.approx(before["local"], abs=0.2)  # one warm-up, two ways to draw
    assert min(before.values()) > 0.1
    for line in lines["vllm"][1:]:
        assert 0.0 <= line["kl_sampler_trainer"] < 1e-6
        assert line["dropped"] == 0.0
    assert sum(line["optimizer_steps"] for line in lines["vllm"][1:]) > 0.0
    for trajectory in told(tmp_path / "vllm", 4):
        (sample,) = trajectory["samples"]
        assert len(sample["pictures"]) == trajectory["turns"]
        assert [bool(logprob) for logprob in sample["logprobs"]] == [bool(mask) for mask in sample["loss_mask"]]
