"""What quantized experts cost, against two whole models side by side."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import load, transformers_model
from tests.models.test_quantized import twin_of
from tinsmith.models.base import BaseModel
from tinsmith.sampling.expert_cost import TEXT, cost_on, measure_cost


def distributions(network: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of what follows each token, in float64."""
    with torch.no_grad():
        logits: Tensor = network(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "nf4"), ("qwen3_vl_moe", "mxfp4"), ("qwen3_5_moe", "fp8")])
def test_it_is_the_divergence_of_whole_models(
    family_dir: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    """The served model is left as it is."""
    directory = family_dir(family)
    base = load(directory, device="cpu", expert_dtype=name)
    before = [buffer.clone() for buffer in base.language_model.buffers()]
    tokens = base.tokenizer(TEXT)["input_ids"][:200]
    theirs = transformers_model(directory)
    changed = transformers_model(directory)
    for layer in base.layout.experts:
        own = f"layers.{layer}.mlp.experts"
        held = twin_of(base, directory).language_model.get_submodule(own)
        changed.get_decoder().get_submodule(own).load_state_dict(held.state_dict())
    original, quantized = (distributions(network, tokens)[:-1] for network in (theirs, changed))
    divergence = (original.exp() * (original - quantized)).sum(-1).mean()
    following = torch.tensor(tokens[1:]).unsqueeze(1)
    cost = cost_on(base, tokens)
    assert cost.tokens == 199
    assert cost.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert cost.divergence > 0.001
    for found, expected in ((cost.original, original), (cost.quantized, quantized)):
        assert found == pytest.approx(-float(expected.gather(1, following).mean()), rel=1e-5)
    assert all(torch.equal(own, now) for own, now in zip(before, base.language_model.buffers(), strict=True))
    assert str(cost).startswith(
        f"{cost.divergence:.2g} nats a token (divergence over 199 tokens of text; their negative"
    )


def test_the_text_is_as_long_as_the_model_takes(family_dir: Callable[[str], Path], text_base: BaseModel) -> None:
    base = load(family_dir("qwen3_moe"), expert_dtype="fp8", max_context=40)
    assert measure_cost(base).tokens == 39
    assert len(text_base.tokenizer(TEXT)["input_ids"]) > 100
    with pytest.raises(ValueError, match="has no quantized experts"):
        measure_cost(text_base)
