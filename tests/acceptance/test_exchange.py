"""`tinsmith export` and `tinsmith import` beside a running server."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.acceptance.elsewhere import ITEM, TOKENS, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, datum, numbers, scores, text_input, train
from tests.running import Server, tinsmith, tinsmith_here


@pytest.fixture
def data(server: Server) -> list[str]:
    """The option that names the server's data directory."""
    return ["--data-dir", str(server.log.parent / "data")]


def test_a_checkpoint_leaves_and_comes_back(
    service: tinker.ServiceClient, data: list[str], family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    client = train(service, "text")
    client.forward_backward([datum(text_input(0, 12))], "cross_entropy")
    client.optim_step(RAW_STEP).result()
    expected = scores(client, [ITEM])[0]
    base = family_dir("qwen3")
    path = client.save_weights_for_sampler("out").result().path
    done = tinsmith("export", path, str(tmp_path / "adapter"), *data)
    assert done.returncode == 0, done.stderr
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    np.testing.assert_allclose(transformers_logprobs(network), expected, atol=1e-4)
    state = client.save_state("out").result().path
    done = tinsmith_here("export", state, str(tmp_path / "merged"), "--merge", *data)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(transformers_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-4)

    done = tinsmith_here("import", str(tmp_path / "adapter"), "back", "--base-model", f"text={base}", *data)
    assert done.stdout.split() == ["tinker://imported/weights/back", "tinker://imported/sampler_weights/back"], done.stderr
    training, sampling = done.stdout.split()
    again = service.create_training_client_from_state(training).result()
    assert scores(again, [ITEM])[0].tolist() == expected.tolist()
    again.optim_step(RAW_STEP).result()
    sampler = service.create_sampling_client(model_path=sampling).result()
    got = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(numbers(got[1:]), expected, atol=1e-4)
    with pytest.raises(Exception, match="holds no optimizer state"):
        service.create_training_client_from_state_with_optimizer(training).result()


def test_what_cannot_be_exchanged_is_said_in_one_line(data: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for run, arguments, message in (
        (tinsmith, ["export", "tinker://x/weights/y", out, *data], "tinker://x/weights/y does not exist"),
        (tinsmith_here, ["export", "x", out, *data], "is not tinker://MODEL_ID"),
        (tinsmith_here, ["export", "tinker://x/weights/y", out, "--data-dir", str(tmp_path)], "holds no data of a server"),
        (tinsmith_here, ["import", str(tmp_path), "a/b", "--base-model", "text=x/y", *data], "cannot name a checkpoint"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("tinsmith: ")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
