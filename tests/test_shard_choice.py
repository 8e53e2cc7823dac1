"""Whether layers are divided where the settings leave that open."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tinsmith import shard_choice
from tinsmith.config import Config, load, to_tree
from tinsmith.errors import ConfigError
from tinsmith.shard_choice import Fit, choose, chosen_shard

RUN = subprocess.run
WHOLE, PARTS, NEITHER, ANYHOW = (
    Fit("a", True, True, False),
    Fit("b", True, False, True),
    Fit("c", True, False, False),
    Fit("d", True, True, True),
)
LARGE = Fit("e", False, False, True)


@pytest.mark.parametrize(
    ("fits", "chosen"),
    [
        ([WHOLE], "none"),
        ([ANYHOW], "none"),
        ([PARTS], "weights"),
        ([ANYHOW, PARTS], "weights"),
        ([WHOLE, PARTS], "none"),  # that model cannot be divided
        ([NEITHER], "none"),
        ([PARTS, NEITHER], "none"),
    ],
)
@pytest.mark.parametrize("sampler", ["vllm", "none"])
def test_layers_are_divided_if_a_model_trains_in_no_other_way(fits: Sequence[Fit], chosen: str, sampler: str) -> None:
    assert choose(fits, load(options={"sampler": sampler})) == chosen


def test_the_local_sampler_needs_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A model that loads is served as before, with less room; one that does not would end in an error of the device."""
    assert choose([WHOLE], load()) == "none"
    assert caplog.text == ""
    assert choose([WHOLE, ANYHOW], load()) == "none"
    assert choose([ANYHOW, PARTS], load()) == "none"
    assert "b has little room to train as a whole on each GPU. To divide its layers, add --sampler vllm" in caplog.text
    with pytest.raises(ConfigError, match=r"e is too large for the GPU of a worker.*--sampler vllm.*--shard none"):
        choose([PARTS, LARGE], load())
    assert choose([PARTS, LARGE], load(options={"sampler": "none"})) == "weights"


@pytest.mark.parametrize("refused", [{"full_state": "compact"}, {"deterministic": True}, {"sequence_parallel_from": 4096}])
def test_what_divided_layers_refuse_divides_nothing(refused: dict[str, object]) -> None:
    assert choose([PARTS], load(options={"sampler": "none"} | refused)) == "none"


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without several GPUs nothing is estimated."""
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: pytest.fail("an estimate"))
    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 4)
    assert [chosen_shard(load(options={"shard": shard}), 4) for shard in ("none", "weights")] == ["none", "weights"]
    assert chosen_shard(load(), 1) == "none"
    assert chosen_shard(load(options={"device": "cpu"}), 4) == "none"
    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 0)
    assert chosen_shard(load(), 4) == "none"


def program(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Let another program make the estimate, for four GPUs."""

    def running(command: Sequence[str], **keywords: Any) -> Any:
        assert command == [sys.executable, "-m", "tinsmith.shard_choice"]
        return RUN([sys.executable, "-c", source], **keywords)

    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 4)
    monkeypatch.setattr(subprocess, "run", running)


def test_the_estimate_of_another_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps([{"name": "large", "loads": False, "whole": False, "divided": True}])
    program(monkeypatch, f"import sys, json; json.load(sys.stdin); print('a word of a library'); print({told!r})")
    assert chosen_shard(load(options={"sampler": "none"}), 4) == "weights"


def test_without_an_estimate_nothing_is_divided(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for source in ("import sys; sys.exit('no such card')", "print('no JSON')", ""):
        program(monkeypatch, source)
        assert chosen_shard(load(options={"sampler": "none"}), 4) == "none"
    assert "no such card" in caplog.text
    assert caplog.text.count("nothing is divided") == 3


def test_the_estimate_is_that_of_the_plan(family_dir: Callable[[str], Path]) -> None:
    """In its own process, of this machine."""
    config = Config([f"small={family_dir('qwen3')}", f"other={family_dir('qwen3_vl')}"])
    config.models.device, config.distributed.workers = "cpu", 2
    command = [sys.executable, "-m", "tinsmith.shard_choice"]
    done = subprocess.run(command, input=json.dumps(to_tree(config)), capture_output=True, text=True, check=True)
    fits = [Fit(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    assert fits == [Fit("small", True, True, True), Fit("other", True, True, True)]
