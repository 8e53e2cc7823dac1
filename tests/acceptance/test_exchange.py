"""`tinsmith export` and `tinsmith import` beside a running server."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.acceptance.elsewhere import ITEM, TOKENS, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, datum, learn, numbers, scores, text_input, train
from tests.running import Server, tinsmith, tinsmith_here


@pytest.fixture
def data(server: Server) -> list[str]:
    """The option that names the server's data directory."""
    return ["--data-dir", str(server.log.parent / "data")]


def moved(base: Path, directory: Path) -> Path:
    """A copy of a base model with one weight of many changed a little."""
    shutil.copytree(base, directory)
    tensors = load_file(directory / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 0.01
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def named_base(adapter: Path) -> str:
    """What an adapter says that it was trained on."""
    return str(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_a_checkpoint_leaves_and_comes_back(
    service: tinker.ServiceClient, data: list[str], family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    client = learn(train(service, "text"), [datum(text_input(0, 12))])
    expected = scores(client, [ITEM])[0]
    base = family_dir("qwen3")
    path = client.save_weights_for_sampler("out").result().path
    done = tinsmith("export", path, str(tmp_path / "adapter"), *data)
    assert done.returncode == 0, done.stderr
    assert named_base(tmp_path / "adapter") == "text"  # and no directory of the server
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    np.testing.assert_allclose(transformers_logprobs(network), expected, atol=1e-4)
    state = client.save_state("out").result().path
    done = tinsmith_here("export", state, str(tmp_path / "merged"), "--merge", *data)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(transformers_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-4)

    done = tinsmith_here("export", path, str(tmp_path / "named"), "--base-model", str(base), *data)
    assert (done.returncode, named_base(tmp_path / "named")) == (0, str(base))

    other = moved(base, tmp_path / "other")
    done = tinsmith_here("export", state, str(tmp_path / "wrong"), "--merge", "--base-model", str(other), *data)
    assert (done.returncode, (tmp_path / "wrong").exists()) == (2, False)
    assert f"{state} was trained on other weights of the base model than {other} has here: base fingerprint " in done.stderr

    done = tinsmith_here("import", str(tmp_path / "adapter"), "back", "--base-model", f"text={base}", *data)
    assert done.stdout.split() == ["tinker://imported/weights/back", "tinker://imported/sampler_weights/back"], done.stderr
    training, sampling = done.stdout.split()
    twice = tinsmith_here("import", str(tmp_path / "adapter"), "back", "--base-model", f"text={base}", *data)
    taken = f"{training} and {sampling} exist already; import under another name, or delete what is there first"
    assert (twice.returncode, twice.stderr) == (2, f"tinsmith: {taken}\n")
    again = service.create_training_client_from_state(training).result()
    assert scores(again, [ITEM])[0].tolist() == expected.tolist()
    again.optim_step(RAW_STEP).result()
    sampler = service.create_sampling_client(model_path=sampling).result()
    got = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(numbers(got[1:]), expected, atol=1e-4)
    with pytest.raises(Exception, match="holds no optimizer state"):
        service.create_training_client_from_state_with_optimizer(training).result()


NO_HUB = (
    "x/y: the model's configuration cannot be read: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
    "them in the cached files; there is no directory of that name, and where the Hub cannot be reached, give --base-model the directory of "
    "the model"
)


def test_what_cannot_be_exchanged_is_said_in_one_line(data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = str(tmp_path / "out")
    for run, arguments, message in (
        (tinsmith, ["export", "tinker://x/weights/y", out, *data], "tinker://x/weights/y does not exist"),
        (tinsmith_here, ["import", str(tmp_path), "a", "--base-model", "text", *data], "say where that is: text=PATH_OR_HUB_ID"),
        (tinsmith_here, ["export", "tinker://x/weights/y", out, "--data-dir", str(tmp_path)], "holds no data of a server"),
        (tinsmith_here, ["import", str(tmp_path), "a/b", "--base-model", "text=x/y", *data], "cannot name a checkpoint"),
        (tinsmith_here, ["import", str(tmp_path), "a", "--base-model", "text=x/y", *data], NO_HUB),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("tinsmith: ")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
