"""Tiny models are real ones in small: transformers loads them, their text is their family's, and a seed fixes every byte."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2Tokenizer,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Tokenizer,
    Qwen3VLForConditionalGeneration,
)

from tinsmith.errors import ConfigError
from tinsmith.models.tiny import TinyKind, write_tiny_model
from tinsmith.models.tiny_tokenizer import MARKUP_TOKENS, SMALLEST_VOCAB, SPECIAL_TOKENS, train_tokenizer

MakeDirectory = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "network_class", "final_norm", "deepstack"),
    [("qwen3_vl", Qwen3VLForConditionalGeneration, 5.0, 1), ("qwen3_5", Qwen3_5ForConditionalGeneration, 4.0, 0)],
)
def test_transformers_loads_them_and_their_pictures(
    family_dir: MakeDirectory, family: str, network_class: Any, final_norm: float, deepstack: int
) -> None:
    """Nothing is missing in the file, left over, or of a wrong shape.

    Qwen3.5's norms add one to their weight, and its tower gives the language model one set of features, not several.
    """
    network, report = network_class.from_pretrained(family_dir(family), output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(network.model.language_model.norm.weight, torch.full((64,), final_norm))
    pictures = [Image.new("RGB", (64, 96), "teal"), Image.new("RGB", (8, 8), "red")]
    processed = AutoImageProcessor.from_pretrained(family_dir(family))(images=pictures, return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]]  # 6 tokens and 1: small pictures stay small
    features = network.model.get_image_features(**processed, return_dict=True)
    assert [tuple(picture.shape) for picture in features.pooler_output] == [(6, 64), (1, 64)]
    assert len(getattr(features, "deepstack_features", None) or []) == deepstack


@pytest.mark.parametrize(("family", "kind"), [("qwen3_vl", Qwen2Tokenizer), ("qwen3_5", Qwen3_5Tokenizer)])
def test_each_family_has_a_tokenizer_of_its_class_in_small(family_dir: MakeDirectory, family: str, kind: type[Any]) -> None:
    """Each special token is one, behind the merges, and the configuration names it; any text comes back; digits are tokens of their own.

    Qwen3.5's keeps a letter and its accent together, which Qwen3's takes for two kinds of characters.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(family_dir(family))
    assert isinstance(tokenizer, kind)
    special = [*SPECIAL_TOKENS, *MARKUP_TOKENS]
    assert [tokenizer.encode(token) for token in special] == [[len(tokenizer) - len(special) + i] for i in range(len(special))]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for text in ("  tabs\tand\n\nlines ", "naïve Grüße 你好 🙂", "x = y[42] ** 2  # it's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("नमस्ते")
    assert (len(words) == 1) == (family == "qwen3_5")
    config = json.loads((family_dir(family) / "config.json").read_text())
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    assert {name: config[f"{name}_token_id"] for name in names} == {name: tokenizer.encode(token)[0] for name, token in names.items()}
    generation = json.loads((family_dir(family) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.pad_token_id]


DIGESTS: dict[TinyKind, tuple[str, str]] = {
    "qwen3-vl": (
        "0703254274ebfe4bf89e65f427fa1fc0ccaeeb2b603c6509ce5ef21489c37009",
        "2a8e8463123b50e2cd12dd2817e6bd8a3d767e7a48a2bac4a200f3399d6801fd",
    ),
    "qwen3-5": (
        "41b15b21032f112352af6838d2e9eccfd901922aa8dbacd921592388abb85453",
        "891a7e53fbbb73278d7b2f23e24611c4d6fbc579926d5c581396d88f301e945f",
    ),
}
"""Of weights and tokenizer, on every machine."""


@pytest.mark.parametrize("kind", DIGESTS)
def test_a_seed_fixes_every_byte(tmp_path: Path, kind: TinyKind) -> None:
    def digests(seed: int) -> dict[str, str]:
        directory = tmp_path / str(seed)
        write_tiny_model(kind, directory, hidden=32, layers=4 if kind == "qwen3-5" else 1, vocab=300, seed=seed)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}

    one, other = digests(0), digests(4)
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]
    assert DIGESTS[kind] == (one["model.safetensors"], one["tokenizer.json"])


@pytest.mark.parametrize(
    ("kind", "auto", "vocab"), [("qwen3", AutoModelForCausalLM, SMALLEST_VOCAB), ("qwen3-5", AutoModelForImageTextToText, 100_000)]
)
def test_the_embedding_has_as_many_rows_as_asked_for_and_the_tokenizer_not_more(
    tmp_path: Path, kind: TinyKind, auto: Any, vocab: int
) -> None:
    write_tiny_model(kind, tmp_path, hidden=8, layers=1, vocab=vocab)
    assert auto.from_pretrained(tmp_path).lm_head.weight.shape == (vocab, 8)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= min(vocab, len(train_tokenizer(100_000)))


def test_sizes_that_no_model_can_have_and_the_directory_of_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab=281 is too small: 256 bytes and the special tokens need at least 282"):
        write_tiny_model("qwen3", tmp_path, vocab=281)
    with pytest.raises(ConfigError, match="hidden=4 must be at least 8 and layers=2 at least 1"):
        write_tiny_model("qwen3", tmp_path, hidden=4)
    for name in ("config.json", "other.safetensors"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match="holds a model, which may be in use; name a new directory"):
            write_tiny_model("qwen3", tmp_path)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
        (tmp_path / name).unlink()
