"""Tiny models are real ones in small: transformers loads them, their tokenizer and chat format are Qwen3's, and a seed fixes every byte."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from tinsmith.errors import ConfigError
from tinsmith.models.tiny import TinyKind, write_tiny_model
from tinsmith.models.tiny_tokenizer import MARKUP_TOKENS, SMALLEST_VOCAB, SPECIAL_TOKENS, train_tokenizer

MakeDirectory = Callable[[str], Path]


@pytest.fixture(scope="module")
def tokenizer(family_dir: MakeDirectory) -> PreTrainedTokenizerBase:
    """As a client loads it."""
    return AutoTokenizer.from_pretrained(family_dir("qwen3_vl"))


def load_whole(auto: Any, directory: Path) -> Any:
    """The model, once nothing was missing in its file, left over, or of a wrong shape."""
    network, report = auto.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    return network


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def test_transformers_loads_the_text_model(family_dir: MakeDirectory) -> None:
    network = load_whole(AutoModelForCausalLM, family_dir("qwen3"))
    assert isinstance(network, Qwen3ForCausalLM)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert network.lm_head.weight.shape == (2048, 64)
    assert torch.equal(network.model.norm.weight, torch.full((64,), 5.0))
    assert network(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_transformers_loads_the_vision_language_model_with_its_pictures(family_dir: MakeDirectory) -> None:
    network = load_whole(AutoModelForImageTextToText, family_dir("qwen3_vl"))
    assert isinstance(network, Qwen3VLForConditionalGeneration)
    assert torch.equal(network.model.language_model.norm.weight, torch.full((64,), 5.0))
    processor = AutoImageProcessor.from_pretrained(family_dir("qwen3_vl"))
    pictures = [Image.new("RGB", (64, 96), "teal"), Image.new("RGB", (8, 8), "red")]
    processed = processor(images=pictures, return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]]  # 6 tokens and 1: small pictures stay small
    assert processed["pixel_values"].shape == (28, 3 * 2 * 16 * 16)
    features = network.model.get_image_features(**processed, return_dict=True)
    assert [tuple(picture.shape) for picture in features.pooler_output] == [(6, 64), (1, 64)]
    assert len(features.deepstack_features) == 1


def test_pictures_that_differ_have_features_that_differ(family_dir: MakeDirectory) -> None:
    network = load_whole(AutoModelForImageTextToText, family_dir("qwen3_vl"))
    processor = AutoImageProcessor.from_pretrained(family_dir("qwen3_vl"))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    features = network.model.get_image_features(**processor(images=list(pixels), return_tensors="pt"), return_dict=True)
    one, other = features.pooler_output
    # The random tower must not drown what distinguishes pictures: a later layer can only use what is left of it.
    assert (one - other).norm() > 0.1 * one.norm()


def test_every_special_token_is_one_token_and_comes_behind_the_merges(tokenizer: PreTrainedTokenizerBase) -> None:
    assert isinstance(tokenizer, Qwen2Tokenizer)
    first = len(tokenizer) - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS)
    ids = [tokenizer.encode(token) for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS)]
    assert ids == [[first + i] for i in range(len(ids))]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_special_tokens_are_left_out_of_decoded_text_and_markup_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("<think>so</think>yes<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>so</think>yes"


@pytest.mark.parametrize("text", ["What digit is this?", "  tabs\tand\n\nlines ", "naïve Grüße 你好 🙂", "x = y[42] ** 2  # it's"])
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_the_chat_template_renders_qwen3s_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What digit is this?"}]},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Sure?"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What digit is this?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_the_configuration_names_the_tokenizers_ids(family_dir: MakeDirectory, tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((family_dir("qwen3_vl") / "config.json").read_text())
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    assert {name: config[f"{name}_token_id"] for name in names} == {name: tokenizer.encode(token)[0] for name, token in names.items()}
    generation = json.loads((family_dir("qwen3_vl") / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.encode("<|im_end|>")[0], tokenizer.encode("<|endoftext|>")[0]]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-vl"])
def test_a_seed_fixes_every_byte(tmp_path: Path, kind: TinyKind) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        write_tiny_model(kind, tmp_path / name, hidden=32, layers=1, vocab=300, seed=seed)
    one, same, other = (digests(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]


def test_the_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    write_tiny_model("qwen3-vl", tmp_path, hidden=32, layers=1, vocab=300)
    assert digests(tmp_path)["model.safetensors"] == "0703254274ebfe4bf89e65f427fa1fc0ccaeeb2b603c6509ce5ef21489c37009"
    assert digests(tmp_path)["tokenizer.json"] == "2a8e8463123b50e2cd12dd2817e6bd8a3d767e7a48a2bac4a200f3399d6801fd"


@pytest.mark.parametrize("vocab", [SMALLEST_VOCAB, 1000, 100_000])
def test_the_embedding_has_as_many_rows_as_asked_for_and_the_tokenizer_not_more(tmp_path: Path, vocab: int) -> None:
    write_tiny_model("qwen3", tmp_path, hidden=8, layers=1, vocab=vocab)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape == (vocab, 8)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == min(vocab, len(train_tokenizer(100_000)))


def test_sizes_that_no_model_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab=281 is too small: 256 bytes and the special tokens need at least 282"):
        write_tiny_model("qwen3", tmp_path, vocab=281)
    with pytest.raises(ConfigError, match="hidden=4 must be at least 8 and layers=2 at least 1"):
        write_tiny_model("qwen3", tmp_path, hidden=4)
    assert list(tmp_path.iterdir()) == []
