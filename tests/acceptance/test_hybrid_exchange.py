"""A hybrid model with pictures (Qwen3.5) through the SDK: what was trained leaves for transformers and PEFT, and comes back."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from PIL import Image
from tinker import types
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, assert_close, image_input, scores, train, with_inputs
from tests.bases import png
from tests.running import Server, serving, tinsmith_here
from tinsmith.models.layout import read_layout


@dataclass(frozen=True)
class Hybrid:
    """A server of one hybrid model."""

    server: Server
    source: Path

    @property
    def data(self) -> list[str]:
        """The option that names the server's data directory."""
        return ["--data-dir", str(self.server.log.parent / "data")]

    def logprobs(self, network: Any, picture: types.ModelInput) -> list[np.ndarray]:
        """What transformers says about both items."""
        return [transformers_logprobs(network), picture_logprobs(network, self.source, picture)]


@pytest.fixture(scope="module")
def hybrid(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    """A server that trains only, because nothing is sampled here."""
    source = family_dir("qwen3_5")
    options = ["--base-model", f"hybrid={source}", "--sampler", "none"]
    with serving(tmp_path_factory.mktemp("hybrid"), *options) as server:
        server.wait_for_health()
        yield Hybrid(server, source)


@pytest.fixture
def service(hybrid: Hybrid) -> Iterator[tinker.ServiceClient]:
    """A session of the SDK."""
    with tinker.ServiceClient(base_url=hybrid.server.url, api_key="tml-test") as client:
        yield client


@torch.no_grad()
def picture_logprobs(network: Any, source: Path, model_input: types.ModelInput) -> np.ndarray:
    """Log-probabilities of token 7 at every position of `image_input(client, 1)`."""
    before, _, after = model_input.chunks
    assert isinstance(before, types.EncodedTextChunk)
    assert isinstance(after, types.EncodedTextChunk)
    image = network.config.image_token_id
    ids = torch.tensor([[*before.tokens, *[image] * 6, *after.tokens]])
    pixels = AutoImageProcessor.from_pretrained(source)(images=[Image.open(io.BytesIO(png(1)))], return_tensors="pt")
    logits = network.eval()(input_ids=ids, mm_token_type_ids=(ids == image).int(), **pixels).logits[0]
    found: np.ndarray = logits.log_softmax(-1)[:, 7].numpy()
    return found


def trained(
    service: tinker.ServiceClient, rank: int
) -> tuple[tinker.TrainingClient, types.ModelInput, list[types.Datum], list[np.ndarray]]:
    """A model after two steps on text and a picture, the picture, both items, and what the server says about them."""
    client = train(service, "hybrid", rank=rank)
    picture = image_input(client, 1)
    items = [ITEM, with_inputs(picture, target_tokens=[7] * picture.length, weights=[1.0] * picture.length)]
    before = scores(client, items)
    for _ in range(2):
        client.forward_backward(items, "cross_entropy")
        client.optim_step(RAW_STEP if rank else types.AdamParams(learning_rate=1e-3)).result()
    after = scores(client, items)
    assert all(np.abs(one - other).max() > 0.1 for one, other in zip(before, after, strict=True))
    return client, picture, items, after


def test_an_adapter_leaves_for_peft_and_comes_back(hybrid: Hybrid, service: tinker.ServiceClient, tmp_path: Path) -> None:
    client, picture, items, expected = trained(service, rank=8)
    path = client.save_state("out").result().path
    done = tinsmith_here("export", path, str(tmp_path / "adapter"), *hybrid.data)
    assert done.returncode == 0, done.stderr
    network = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(hybrid.source), str(tmp_path / "adapter"))
    covered = {target.module for target in read_layout(str(hybrid.source)).targets.values()}
    assert sum(hasattr(module, "lora_A") for module in network.modules()) == len(covered)  # PEFT has left nothing out
    assert_close(hybrid.logprobs(network, picture), expected)

    done = tinsmith_here("export", path, str(tmp_path / "merged"), "--merge", *hybrid.data)
    assert done.returncode == 0, done.stderr
    assert_close(hybrid.logprobs(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"), picture), expected)

    done = tinsmith_here("import", str(tmp_path / "adapter"), "back", "--base-model", f"hybrid={hybrid.source}", *hybrid.data)
    assert done.returncode == 0, done.stderr
    again = service.create_training_client_from_state(done.stdout.split()[0]).result()
    assert [score.tolist() for score in scores(again, items)] == [score.tolist() for score in expected]


def test_all_parameters_leave_for_transformers(hybrid: Hybrid, service: tinker.ServiceClient, tmp_path: Path) -> None:
    client, picture, _, expected = trained(service, rank=0)
    path = client.save_state("full").result().path
    done = tinsmith_here("export", path, str(tmp_path / "merged"), "--merge", *hybrid.data)
    assert done.returncode == 0, done.stderr
    network = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    untrained = dict(AutoModelForImageTextToText.from_pretrained(hybrid.source).named_parameters())
    same = [name for name, parameter in network.named_parameters() if torch.equal(parameter, untrained[name])]
    assert all("visual" in name for name in same)
    assert_close(hybrid.logprobs(network, picture), expected)
