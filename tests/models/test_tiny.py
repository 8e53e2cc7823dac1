"""Tiny models: a seed fixes every byte, and sizes are obeyed or refused.

All other tests use them as the models that they are in small.
"""

import hashlib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.bases import load
from tinsmith.cli import tiny_model
from tinsmith.errors import ConfigError
from tinsmith.models.tiny import HARMONY, QWEN3, TEXT_ONLY, TinyKind, train_tokenizer, write_tiny_model

DIGESTS: dict[TinyKind, tuple[str, str]] = {
    "qwen3-vl": (
        "0703254274ebfe4bf89e65f427fa1fc0ccaeeb2b603c6509ce5ef21489c37009",
        "2a8e8463123b50e2cd12dd2817e6bd8a3d767e7a48a2bac4a200f3399d6801fd",
    ),
    "qwen3-5": (
        "41b15b21032f112352af6838d2e9eccfd901922aa8dbacd921592388abb85453",
        "891a7e53fbbb73278d7b2f23e24611c4d6fbc579926d5c581396d88f301e945f",
    ),
    "qwen3-moe": (
        "a5e7c5497eab0ca4aefe65968612f419e87f966c72df901a0279525f405e2597",
        "2a8e8463123b50e2cd12dd2817e6bd8a3d767e7a48a2bac4a200f3399d6801fd",
    ),
    "qwen3-vl-moe": (
        "caf305a32bcfa62d8fc102f7e92ad948b5471a3c3430c6818ccecc6301995b67",
        "2a8e8463123b50e2cd12dd2817e6bd8a3d767e7a48a2bac4a200f3399d6801fd",
    ),
    "qwen3-5-moe": (
        "71116d9d8d9cd3435af3ac80340e176878249fa660872668e05879c518590dd2",
        "891a7e53fbbb73278d7b2f23e24611c4d6fbc579926d5c581396d88f301e945f",
    ),
    "gpt-oss": (
        "0b1f240db64c878b794890ad92cedb9a41f9f3144c3fb3273c05845fd838c8fc",
        "f5ee44388037b3a8359c93d89e9a34b0fe5e1ad0c361dfb3706633a40972cf9f",
    ),
}
"""Of weights and tokenizer, on every machine."""


@pytest.mark.parametrize("kind", DIGESTS)
def test_a_seed_fixes_every_byte(tmp_path: Path, kind: TinyKind) -> None:
    def digests(seed: int) -> dict[str, str]:
        directory = tmp_path / str(seed)
        write_tiny_model(
            kind, directory, hidden=32, layers=4 if kind.startswith("qwen3-5") else 1, vocab=300, seed=seed
        )
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}

    one, other = digests(0), digests(4)
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]
    assert DIGESTS[kind] == (one["model.safetensors"], one["tokenizer.json"])


@pytest.mark.parametrize(
    ("kind", "auto", "vocab"),
    [
        ("qwen3", AutoModelForCausalLM, QWEN3.smallest_vocab),
        ("gpt-oss", AutoModelForCausalLM, HARMONY.smallest_vocab),
        ("qwen3-5", AutoModelForImageTextToText, 100_000),
        ("qwen3-5-moe", AutoModelForImageTextToText, 500),
    ],
)
def test_the_embedding_has_as_many_rows_as_asked_for_and_the_tokenizer_not_more(
    tmp_path: Path, kind: TinyKind, auto: Any, vocab: int
) -> None:
    write_tiny_model(kind, tmp_path, hidden=8, layers=1, vocab=vocab)
    assert auto.from_pretrained(tmp_path).lm_head.weight.shape == (vocab, 8)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= min(vocab, len(train_tokenizer(100_000)))


EXPERTS = ("gate_up_proj", "down_proj")


def experts_as_published(kind: TinyKind, directory: Path) -> dict[str, torch.Tensor]:
    """The stacks [experts, out, in] of the first layer, by name, put together from what the family publishes.

    The shapes of the files of Qwen3-30B-A3B, Qwen3-VL-30B-A3B and Qwen3.5-35B-A3B, in small. GPT-OSS's are those of its
    copies in bfloat16, and [experts, in, out].
    """
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.{'' if kind in TEXT_ONLY else 'language_model.'}layers.0.mlp.experts"
    found = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if kind == "qwen3-moe":
        assert {tuple(tensor.shape) for name, tensor in found.items() if "down" not in name} == {(24, 32)}
        gate, up, down = (
            torch.stack([found[f"{number}.{part}_proj.weight"] for number in range(8)])
            for part in ("gate", "up", "down")
        )
        assert len(found) == 8 * 3
        return {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    if kind == "gpt-oss":
        assert set(found) == {*EXPERTS, "gate_up_proj_bias", "down_proj_bias"}
        return found
    assert set(found) == set(EXPERTS)
    return {name: tensor.transpose(1, 2) for name, tensor in found.items()} if kind == "qwen3-vl-moe" else found


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-vl-moe", "qwen3-5-moe", "gpt-oss"])
def test_experts_are_in_the_files_as_the_family_publishes_them(tmp_path: Path, kind: TinyKind) -> None:
    """Transformers and Tinsmith compute with the same stacks; it writes other files than were published."""
    write_tiny_model(kind, tmp_path, hidden=32, vocab=300)
    published = experts_as_published(kind, tmp_path)
    shapes = [tuple(published[name].shape) for name in EXPERTS]
    assert shapes == ([(8, 32, 96), (8, 48, 32)] if kind == "gpt-oss" else [(8, 48, 32), (8, 32, 24)])

    auto: Any = AutoModelForCausalLM if kind in TEXT_ONLY else AutoModelForImageTextToText
    network, base = auto.from_pretrained(tmp_path), load(tmp_path)
    for name in EXPERTS:
        (theirs,) = (value for key, value in network.named_parameters() if key.endswith(f"layers.0.mlp.experts.{name}"))
        assert torch.equal(theirs, published[name])
        ours = base.language_model.get_parameter(f"layers.0.mlp.experts.{name}")
        assert torch.equal(ours.cpu(), published[name])


@pytest.mark.parametrize(
    ("dense", "mixture"), [("qwen3", "qwen3-moe"), ("qwen3-vl", "qwen3-vl-moe"), ("qwen3-5", "qwen3-5-moe")]
)
def test_a_mixture_reads_text_and_images_as_its_dense_sibling(
    tmp_path: Path, dense: TinyKind, mixture: TinyKind
) -> None:
    """A client of either needs to know no more than the family."""
    for kind in (dense, mixture):
        write_tiny_model(kind, tmp_path / kind, hidden=32, vocab=300)
    own, other = ({file.name: file for file in (tmp_path / kind).iterdir()} for kind in (dense, mixture))
    assert own.keys() == other.keys()
    differ = [name for name in own if own[name].read_bytes() != other[name].read_bytes()]
    assert sorted(differ) == ["config.json", "model.safetensors"]
    assert len({type(AutoTokenizer.from_pretrained(tmp_path / kind)) for kind in (dense, mixture)}) == 1


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


def test_the_command_offers_every_kind() -> None:
    assert get_type_hints(tiny_model)["kind"] == TinyKind
