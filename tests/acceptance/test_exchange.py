"""`tinsmith export` and `tinsmith import` beside a running server, for a hybrid model with images (Qwen3.5).

What was trained leaves for transformers and PEFT, and comes back.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.acceptance.conftest import API_KEY, connect, ready
from tests.acceptance.elsewhere import ITEM, TOKENS, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, assert_close, image_input, numbers, scores, train, with_inputs
from tests.acceptance.test_catalog import download
from tests.bases import png
from tests.running import Server, tinsmith, tinsmith_here
from tinsmith.models.layout import read_layout


@pytest.fixture(scope="module")
def source(family_dir: Callable[[str], Path]) -> Path:
    """The model that is served as `hybrid`."""
    return family_dir("qwen3_5")


@pytest.fixture(scope="module")
def hybrid(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready(
        tmp_path_factory.mktemp("hybrid"), "--base-model", f"hybrid={source}", "--kv-cache-gib", "0.1"
    ) as server:
        yield server


@pytest.fixture
def service(hybrid: Server) -> Iterator[tinker.ServiceClient]:
    with connect(hybrid) as client:
        yield client


@pytest.fixture
def run(hybrid: Server) -> Callable[..., "CompletedProcess[str]"]:
    """A command on the server's data directory that ends with this exit code."""

    def run(*arguments: object, expected: int = 0) -> "CompletedProcess[str]":
        done = tinsmith_here(*map(str, arguments), "--data-dir", str(hybrid.log.parent / "data"))
        assert done.returncode == expected, done.stderr
        return done

    return run


class Trained:
    """A model after two steps on text and an image, and what the server says about both."""

    def __init__(self, service: tinker.ServiceClient, source: Path, rank: int) -> None:
        self.source, self.client = source, train(service, "hybrid", rank=rank)
        self.image = image_input(self.client, 1)
        every = self.image.length
        self.items = [ITEM, with_inputs(self.image, target_tokens=[7] * every, weights=[1.0] * every)]
        before = scores(self.client, self.items)
        for _ in range(2):
            self.client.forward_backward(self.items, "cross_entropy")
            self.client.optim_step(RAW_STEP if rank else types.AdamParams(learning_rate=1e-3)).result()
        self.expected = scores(self.client, self.items)
        assert all(np.abs(one - other).max() > 0.1 for one, other in zip(before, self.expected, strict=True))

    @torch.no_grad()
    def assert_same(self, network: Any) -> None:
        """What transformers says about both items."""
        before, _, after = self.image.chunks
        assert isinstance(before, types.EncodedTextChunk)
        assert isinstance(after, types.EncodedTextChunk)
        image = network.config.image_token_id
        ids = torch.tensor([[*before.tokens, *[image] * 6, *after.tokens]])
        pixels = AutoImageProcessor.from_pretrained(self.source)(
            images=[Image.open(io.BytesIO(png(1)))], return_tensors="pt"
        )
        logits = network.eval()(input_ids=ids, mm_token_type_ids=(ids == image).int(), **pixels).logits[0]
        assert_close([transformers_logprobs(network), logits.log_softmax(-1)[:, 7].numpy()], self.expected)


def test_an_adapter_leaves_for_peft_and_comes_back(
    service: tinker.ServiceClient, source: Path, run: Callable[..., "CompletedProcess[str]"], tmp_path: Path
) -> None:
    trained = Trained(service, source, rank=8)
    path = trained.client.save_state("out").result().path
    # Not the server's directory, unless it is asked for
    for more, named in (([], "hybrid"), (["--base-model", source], str(source))):
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        run("export", path, tmp_path / "adapter", *more)
        assert (
            json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == named
        )
    network = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(source), str(tmp_path / "adapter"))
    covered = {target.module for target in read_layout(str(source)).targets.values()}
    assert sum(hasattr(module, "lora_A") for module in network.modules()) == len(covered)  # PEFT has left nothing out
    trained.assert_same(network)
    run("export", path, tmp_path / "merged", "--merge")
    trained.assert_same(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))

    other = shutil.copytree(source, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 0.01
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    refused = run("export", path, tmp_path / "wrong", "--merge", "--base-model", other, expected=2)
    assert (
        f"{path} was trained on other weights of the base model than {other} has here: base fingerprint "
        in refused.stderr
    )
    assert not (tmp_path / "wrong").exists()

    arguments = ["import", tmp_path / "adapter", "back", "--base-model", f"hybrid={source}"]
    training, sampling = run(*arguments).stdout.split()
    assert (training, sampling) == ("tinker://imported/weights/back", "tinker://imported/sampler_weights/back")
    taken = f"{training} and {sampling} exist already; import under another name, or delete what is there first"
    assert run(*arguments, expected=2).stderr == f"tinsmith: {taken}\n"
    again = service.create_training_client_from_state(training).result()
    assert [score.tolist() for score in scores(again, trained.items)] == [score.tolist() for score in trained.expected]
    again.optim_step(RAW_STEP).result()
    got = (
        service.create_sampling_client(model_path=sampling)
        .result()
        .compute_logprobs(types.ModelInput.from_ints(TOKENS))
        .result()
    )
    np.testing.assert_allclose(numbers(got[1:]), trained.expected[0], atol=1e-4)
    with pytest.raises(Exception, match="holds no optimizer state"):
        service.create_training_client_from_state_with_optimizer(training).result()


def test_all_parameters_leave_for_transformers(
    service: tinker.ServiceClient,
    hybrid: Server,
    source: Path,
    run: Callable[..., "CompletedProcess[str]"],
    tmp_path: Path,
) -> None:
    trained = Trained(service, source, rank=0)
    path = trained.client.save_state("full").result().path
    refused = run("export", path, tmp_path / "merged", expected=2)
    assert "is of rank 0: all parameters were trained, and there is no adapter to write; add --merge" in refused.stderr
    run("export", path, tmp_path / "merged", "--merge")
    external = trained.client.save_weights_external("full").result().path
    files = download(tinker.RestClient(base_url=hybrid.url, api_key=API_KEY), external, tmp_path / "downloaded")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    untrained = dict(AutoModelForImageTextToText.from_pretrained(source).named_parameters())
    for directory in ("merged", "downloaded"):
        network = AutoModelForImageTextToText.from_pretrained(tmp_path / directory)
        assert all(
            "visual" in name for name, weights in network.named_parameters() if torch.equal(weights, untrained[name])
        )
        trained.assert_same(network)


def test_what_cannot_be_exchanged_is_said_in_one_line(hybrid: Server, tmp_path: Path) -> None:
    out, data = str(tmp_path / "out"), str(hybrid.log.parent / "data")
    for run, command, data_dir, message in (
        (tinsmith, ["export", "tinker://x/weights/y", out], data, "tinker://x/weights/y does not exist"),
        (
            tinsmith_here,
            ["import", str(tmp_path), "a", "--base-model", "text"],
            data,
            "say where that is: text=PATH_OR_HUB_ID",
        ),
        (tinsmith_here, ["export", "tinker://x/weights/y", out], str(tmp_path), "holds no data of a server"),
        (tinsmith_here, ["import", str(tmp_path), "a/b", "--base-model", "text=x/y"], data, "cannot name a checkpoint"),
    ):
        done = run(*command, "--data-dir", data_dir)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout, line.startswith("tinsmith: "), message in line) == (2, "", True, True), (
            line
        )
    assert not (tmp_path / "out").exists()
