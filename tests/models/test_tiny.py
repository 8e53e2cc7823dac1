"""Tiny models: a seed fixes every byte, and sizes are obeyed or refused.

All other tests use them as the models that they are in small.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tinsmith.errors import ConfigError
from tinsmith.models.tiny import SMALLEST_VOCAB, TinyKind, train_tokenizer, write_tiny_model

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
    ("kind", "auto", "vocab"),
    [("qwen3", AutoModelForCausalLM, SMALLEST_VOCAB), ("qwen3-5", AutoModelForImageTextToText, 100_000)],
)
def test_the_embedding_has_as_many_rows_as_asked_for_and_the_tokenizer_not_more(
    tmp_path: Path, kind: TinyKind, auto: Any, vocab: int
) -> None:
    write_tiny_model(kind, tmp_path, hidden=8, layers=1, vocab=vocab)
    assert auto.from_pretrained(tmp_path).lm_head.weight.shape == (vocab, 8)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= min(vocab, len(train_tokenizer(100_000)))


def test_sizes_that_no_model_can_have_and_a_directory_that_is_not_empty_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab=281 is too small: 256 bytes and the special tokens need at least 282"):
        write_tiny_model("qwen3", tmp_path, vocab=281)
    with pytest.raises(ConfigError, match="hidden=4 must be at least 8 and layers=2 at least 1"):
        write_tiny_model("qwen3", tmp_path, hidden=4)
    for name in ("config.json", "other.safetensors", "tokenizer.json", "other.gguf"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match="is not an empty directory; name a new one"):
            write_tiny_model("qwen3", tmp_path)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
        (tmp_path / name).unlink()
