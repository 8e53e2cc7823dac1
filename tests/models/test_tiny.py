"""Tiny models are real ones in small: transformers loads them, their text is their family's, and a seed fixes every byte."""

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
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Tokenizer,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from tinsmith.errors import ConfigError
from tinsmith.models.tiny import TinyKind, write_tiny_model
from tinsmith.models.tiny_tokenizer import MARKUP_TOKENS, QWEN3_5, SMALLEST_VOCAB, SPECIAL_TOKENS, train_tokenizer

MakeDirectory = Callable[[str], Path]


PICTURES = ["qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="module")
def tokenizer(family_dir: MakeDirectory) -> PreTrainedTokenizerBase:
    """As a client loads it."""
    return AutoTokenizer.from_pretrained(family_dir("qwen3_vl"))


@pytest.fixture(scope="module")
def thinking_tokenizer(family_dir: MakeDirectory) -> PreTrainedTokenizerBase:
    """Qwen3.5's, whose conversations have a place for thinking."""
    return AutoTokenizer.from_pretrained(family_dir("qwen3_5"))


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


@pytest.mark.parametrize(
    ("family", "network_class", "final_norm", "deepstack"),
    [("qwen3_vl", Qwen3VLForConditionalGeneration, 5.0, 1), ("qwen3_5", Qwen3_5ForConditionalGeneration, 4.0, 0)],
)
def test_transformers_loads_the_models_that_take_pictures(
    family_dir: MakeDirectory, family: str, network_class: type[Any], final_norm: float, deepstack: int
) -> None:
    """Qwen3.5's norms add one to their weight, and its tower gives the language model one set of features, not several."""
    network = load_whole(AutoModelForImageTextToText, family_dir(family))
    assert isinstance(network, network_class)
    assert torch.equal(network.model.language_model.norm.weight, torch.full((64,), final_norm))
    processor = AutoImageProcessor.from_pretrained(family_dir(family))
    pictures = [Image.new("RGB", (64, 96), "teal"), Image.new("RGB", (8, 8), "red")]
    processed = processor(images=pictures, return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]]  # 6 tokens and 1: small pictures stay small
    assert processed["pixel_values"].shape == (28, 3 * 2 * 16 * 16)
    features = network.model.get_image_features(**processed, return_dict=True)
    assert [tuple(picture.shape) for picture in features.pooler_output] == [(6, 64), (1, 64)]
    assert len(getattr(features, "deepstack_features", None) or []) == deepstack
    # The random tower must not drown what distinguishes pictures: a later layer can only use what is left of it.
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    one, other = network.model.get_image_features(**processor(images=list(pixels), return_tensors="pt"), return_dict=True).pooler_output
    assert (one - other).norm() > 0.1 * one.norm()


HYBRID_FIELDS = {
    *("attention_bias", "attn_output_gate", "dtype", "eos_token_id", "full_attention_interval", "head_dim", "hidden_act", "hidden_size"),
    *("intermediate_size", "layer_types", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype", "max_position_embeddings", "model_type"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size"),
}
"""What the `text_config` of Qwen/Qwen3.5-4B says that decides what its language model computes."""


def test_the_hybrid_model_is_configured_as_the_real_one(family_dir: MakeDirectory) -> None:
    """The fields of Qwen/Qwen3.5-4B's config.json, with its values where they are no sizes."""
    config = json.loads((family_dir("qwen3_5") / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert (config["model_type"], config["architectures"]) == ("qwen3_5", ["Qwen3_5ForConditionalGeneration"])
    assert text["model_type"] == "qwen3_5_text"
    assert HYBRID_FIELDS - text.keys() == set()
    assert text["layer_types"] == ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    assert (text["linear_conv_kernel_dim"], text["mamba_ssm_dtype"], text["attn_output_gate"]) == (4, "float32", True)
    assert text["linear_num_value_heads"] == 2 * text["linear_num_key_heads"]
    rope = text["rope_parameters"]
    assert (rope["rope_type"], rope["partial_rotary_factor"], rope["mrope_interleaved"]) == ("default", 0.25, True)
    assert sum(rope["mrope_section"]) == text["head_dim"] * 0.25 / 2  # pairs of a head that turn
    assert vision["deepstack_visual_indexes"] == []
    assert (vision["patch_size"], vision["spatial_merge_size"], vision["temporal_patch_size"]) == (16, 2, 2)


def test_a_delta_nets_heads_forget_at_different_speeds(family_dir: MakeDirectory) -> None:
    """Where the input says nothing about it, a token leaves half of what the first head remembers, and nearly all of what the last does."""
    network = load_whole(AutoModelForImageTextToText, family_dir("qwen3_5"))
    layer = network.model.language_model.layers[0].linear_attn
    kept = torch.exp(-layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias))
    assert kept.min() < 0.6
    assert kept.max() > 0.98


TEXTS = ["What digit is this?", "  tabs\tand\n\nlines ", "naïve Grüße 你好 🙂", "x = y[42] ** 2  # it's"]


@pytest.mark.parametrize(("family", "kind"), [("qwen3_vl", Qwen2Tokenizer), ("qwen3_5", Qwen3_5Tokenizer)])
def test_each_family_has_a_tokenizer_of_its_class_in_small(family_dir: MakeDirectory, family: str, kind: type[Any]) -> None:
    """Each special token is one, behind the merges; any text comes back; digits are tokens of their own.

    Qwen3.5's keeps a letter and its accent together, which Qwen3's takes for two kinds of characters.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(family_dir(family))
    assert isinstance(tokenizer, kind)
    special = [*SPECIAL_TOKENS, *MARKUP_TOKENS]
    assert [tokenizer.encode(token) for token in special] == [[len(tokenizer) - len(special) + i] for i in range(len(special))]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("<think>so</think>yes<|im_end|>"), skip_special_tokens=True) == "<think>so</think>yes"
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("नमस्ते")
    assert (len(words) == 1) == (family == "qwen3_5")


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


def test_qwen3_5s_chat_template_keeps_the_thinking_of_the_last_answers(thinking_tokenizer: PreTrainedTokenizerBase) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What digit is this?"}]},
        {"role": "assistant", "content": "<think>\nOne stroke.\n</think>\n\n7"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It has no loop."},
        {"role": "assistant", "content": "Quite."},
    ]
    asked = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What digit is this?<|im_end|>\n"
    )
    first, last = "<|im_start|>assistant\n7<|im_end|>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\nQuite.<|im_end|>\n"
    second = "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\nIt has no loop.\n</think>\n\nYes.<|im_end|>\n"
    preserved = first.replace("7", "<think>\nOne stroke.\n</think>\n\n7")

    def rendered(count: int, **options: Any) -> str:
        return str(thinking_tokenizer.apply_chat_template(messages[:count], tokenize=False, **options))

    assert rendered(6) == asked + first + second + last
    assert rendered(6, preserve_thinking=True) == asked + preserved + second + last
    assert rendered(3) == asked + preserved  # nothing has been asked since
    assert rendered(2, add_generation_prompt=True) == asked + "<|im_start|>assistant\n<think>\n"
    without = rendered(2, add_generation_prompt=True, enable_thinking=False)
    assert without == asked + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("family", PICTURES)
def test_the_configuration_names_the_tokenizers_ids(family_dir: MakeDirectory, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir(family))
    config = json.loads((family_dir(family) / "config.json").read_text())
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    assert {name: config[f"{name}_token_id"] for name in names} == {name: tokenizer.encode(token)[0] for name, token in names.items()}
    generation = json.loads((family_dir(family) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.encode("<|im_end|>")[0], tokenizer.encode("<|endoftext|>")[0]]


DIGESTS: dict[TinyKind, tuple[str, str] | None] = {
    "qwen3": None,
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
    for name, seed in (("one", 0), ("same", 0), ("other", 4)):
        write_tiny_model(kind, tmp_path / name, hidden=32, layers=4 if kind == "qwen3-5" else 1, vocab=300, seed=seed)
    one, same, other = (digests(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]
    assert DIGESTS[kind] in (None, (one["model.safetensors"], one["tokenizer.json"]))


@pytest.mark.parametrize(("kind", "auto"), [("qwen3", AutoModelForCausalLM), ("qwen3-5", AutoModelForImageTextToText)])
@pytest.mark.parametrize("vocab", [SMALLEST_VOCAB, 1000, 100_000])
def test_the_embedding_has_as_many_rows_as_asked_for_and_the_tokenizer_not_more(
    tmp_path: Path, kind: TinyKind, auto: Any, vocab: int
) -> None:
    write_tiny_model(kind, tmp_path, hidden=8, layers=1, vocab=vocab)
    assert auto.from_pretrained(tmp_path).lm_head.weight.shape == (vocab, 8)
    largest = train_tokenizer(100_000, QWEN3_5) if kind == "qwen3-5" else train_tokenizer(100_000)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == min(vocab, len(largest))


def test_sizes_that_no_model_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab=281 is too small: 256 bytes and the special tokens need at least 282"):
        write_tiny_model("qwen3", tmp_path, vocab=281)
    with pytest.raises(ConfigError, match="hidden=4 must be at least 8 and layers=2 at least 1"):
        write_tiny_model("qwen3", tmp_path, hidden=4)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "other.safetensors"):
        directory = tmp_path / name.partition(".")[0]
        directory.mkdir()
        (directory / name).write_text("mine")
        with pytest.raises(ConfigError, match="holds a model, which may be in use; name a new directory"):
            write_tiny_model("qwen3", directory)
        assert [(path.name, path.read_text()) for path in directory.iterdir()] == [(name, "mine")]
