"""Tiny random models in the real format: Qwen3, Qwen3-VL and Qwen3.5, each also as a mixture of experts, and GPT-OSS.

They have a small tokenizer, and image processor files if they take images.

For tests, and for trying things out where nothing can be downloaded. Every file is a function of the arguments and the
seed: weights come from random integers scaled by one multiplication, which give the same bits on every machine.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tinsmith.config_values import require_empty
from tinsmith.errors import ConfigError

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

SPECIAL_TOKENS = (
    *(
        END_OF_TEXT,
        START_OF_TURN,
        END_OF_TURN,
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ),
    *("<|quad_start|>", "<|quad_end|>", VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO),
)
"""Tokens that `skip_special_tokens` leaves out of decoded text."""

MARKUP_TOKENS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Added tokens that stay visible in decoded text: a client parses them."""

CONTEXT = 32768
"""Longest sequence of a tiny model, in tokens."""

WINDOW = 32
"""Sliding window of GPT-OSS, in tokens."""

BYTES = 256
RETURN, CALL = "<|return|>", "<|call|>"
HARMONY_TOKENS = (
    *("<|startoftext|>", END_OF_TEXT, RETURN, "<|constrain|>", "<|channel|>"),
    *("<|start|>", "<|end|>", "<|message|>", CALL),
)
"""Special tokens of GPT-OSS. A client parses them, and decodes without leaving them out."""
HARMONY_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
"""What GPT-OSS splits text into."""


def _harmony_tokenizer(vocab: dict[str, int], merges: list[Any], **settings: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    split = pre_tokenizers.Split(Regex("|".join(HARMONY_WORDS)), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


@dataclass(frozen=True)
class TextFormat:
    """How a family splits text into tokens, and what marks the turns of a conversation."""

    tokenizer: Callable[..., Any]
    """Makes the tokenizer of `vocab`, `merges` and settings."""
    chat_template: str
    """A file beside this module."""
    special: tuple[str, ...]
    markup: tuple[str, ...]
    ends: tuple[str, ...]
    """Tokens that end an answer; the first ends a turn."""

    @property
    def smallest_vocab(self) -> int:
        return BYTES + len(self.special) + len(self.markup)


QWEN3 = TextFormat(Qwen2Tokenizer, "tiny_chat.jinja", SPECIAL_TOKENS, MARKUP_TOKENS, (END_OF_TURN, END_OF_TEXT))
QWEN3_5 = TextFormat(
    Qwen3_5Tokenizer, "tiny_chat_qwen3_5.jinja", SPECIAL_TOKENS, MARKUP_TOKENS, (END_OF_TURN, END_OF_TEXT)
)
HARMONY = TextFormat(_harmony_tokenizer, "tiny_chat_gpt_oss.jinja", HARMONY_TOKENS, (), (RETURN, END_OF_TEXT, CALL))

TinyKind = Literal["qwen3", "qwen3-vl", "qwen3-5", "qwen3-moe", "qwen3-vl-moe", "qwen3-5-moe", "gpt-oss"]

DEFAULT_LAYERS: dict[TinyKind, int] = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "qwen3-moe", "qwen3-vl-moe", "gpt-oss"), 2),
    **dict.fromkeys(("qwen3-5", "qwen3-5-moe"), 4),
}
"""Decoder layers. Of Qwen3.5's, every fourth attends; the others are gated delta nets. Of GPT-OSS's, every other has a
sliding window.
"""
TEXT_ONLY: tuple[TinyKind, ...] = ("qwen3", "qwen3-moe", "gpt-oss")
FORMATS: dict[TinyKind, TextFormat] = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "qwen3-moe", "qwen3-vl-moe"), QWEN3),
    **dict.fromkeys(("qwen3-5", "qwen3-5-moe"), QWEN3_5),
    "gpt-oss": HARMONY,
}

PATCH, MERGE, FRAMES = 16, 2, 2
"""Sizes of Qwen3-VL and Qwen3.5: 16x16 pixels a patch, in 2 frames (an image is in both); 2x2 patches a token."""

SMALLEST_IMAGE, LARGEST_IMAGE = 32 * 32, 1024 * 1024
"""Limits in pixels: images outside are scaled. Real models start at 65536 (64 tokens); here one token is enough."""

FINAL_NORM = 5.0
"""Weight of the last norm: a weight of 1 would leave every distribution flat, and sampling at temperature 1 noise.

With tied embeddings no logit gets much above (norm weight) x (hidden width) x (embedding deviation): 1.3 for a weight
of 1 and the usual deviation of 0.02.
"""


def write_tiny_model(
    kind: TinyKind, directory: Path, hidden: int = 64, layers: int | None = None, vocab: int = 2048, seed: int = 0
) -> None:
    """Write a random model with `layers` decoder layers (None: `DEFAULT_LAYERS`) and `vocab` embedding rows.

    Raises ConfigError: an unknown kind, sizes that no model can have, a vocabulary too small for the tokenizer, a
    directory that is not empty.
    """
    require_empty(directory)
    if kind not in DEFAULT_LAYERS:
        raise ConfigError(f"kind={kind!r} must be one of {', '.join(DEFAULT_LAYERS)}")
    layers = DEFAULT_LAYERS[kind] if layers is None else layers
    if hidden < 8 or layers < 1:
        raise ConfigError(f"hidden={hidden} must be at least 8 and layers={layers} at least 1")
    tokenizer = train_tokenizer(vocab, FORMATS[kind])
    ends = [_id(tokenizer, token) for token in FORMATS[kind].ends]
    network = _network(kind, _text_config(hidden, layers, vocab, tokenizer), tokenizer)
    _fill(network, seed)
    directory.mkdir(parents=True, exist_ok=True)
    _save_network(kind, network, directory)
    GenerationConfig(
        eos_token_id=ends,
        pad_token_id=_id(tokenizer, END_OF_TEXT),
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if kind not in TEXT_ONLY:
        _write_json(
            directory / "preprocessor_config.json",
            {"image_processor_type": "Qwen2VLImageProcessor", **_image_settings()},
        )
        _write_json(
            directory / "video_preprocessor_config.json",
            {"video_processor_type": "Qwen3VLVideoProcessor", **_image_settings()},
        )


def _network(kind: TinyKind, text: dict[str, Any], tokenizer: Any) -> PreTrainedModel:
    match kind:
        case "gpt-oss":
            return GptOssForCausalLM(GptOssConfig(**_gpt_oss_config(text)))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**text, rope_parameters=_rope()))
        case "qwen3-moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **_experts(text), rope_parameters=_rope()))
        case "qwen3-vl":
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_qwen3_vl_config(text, tokenizer)))
        case "qwen3-vl-moe":
            config = _qwen3_vl_config({**text, **_experts(text)}, tokenizer)
            return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**config))
        case "qwen3-5":
            return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**_qwen3_5_config(text, tokenizer)))
        case "qwen3-5-moe":
            shared = {"shared_expert_intermediate_size": text["hidden_size"]}
            config = _qwen3_5_config({**text, **_experts(text), **shared}, tokenizer)
            return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**config))


def _experts(text: dict[str, Any]) -> dict[str, Any]:
    """Eight experts, of which two compute a token.

    No matrix of theirs is square: transformers tells by the shape alone whether those of a Qwen3-VL are transposed.
    """
    return {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * text["hidden_size"] // 4,
        "norm_topk_prob": True,
    }


def _text_config(hidden: int, layers: int, vocab: int, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": _id(tokenizer, END_OF_TEXT),
        "dtype": "float32",
    }


def _gpt_oss_config(text: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
    rope["original_max_position_embeddings"] = CONTEXT // 4
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3 * text["hidden_size"] // 2}
    return {**text, **experts, "sliding_window": WINDOW, "tie_word_embeddings": False, "rope_parameters": rope}


def _rope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | extra


def _qwen3_vl_config(text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    # The time, height and width of a position turn 8, 4 and 4 of the 16 rotary pairs of a head.
    rope = _rope(mrope_interleaved=True, mrope_section=[8, 4, 4])
    vision = _vision(text) | {"deepstack_visual_indexes": [0]}
    return {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision, **_outer(tokenizer)}


def _qwen3_5_config(text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    # A quarter of each head turns with positions: 2 of its 4 rotary pairs with time, one each with height and width.
    rope = _rope(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.25)
    layer_types = [
        "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(text["num_hidden_layers"])
    ]
    delta_net = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }
    text = {**text, **delta_net, "layer_types": layer_types, "rope_parameters": rope}
    vision = _vision(text) | {"deepstack_visual_indexes": []}
    return {"text_config": text, "vision_config": vision, **_outer(tokenizer)}


def _vision(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16 * 16,
        "dtype": "float32",
    }


def _outer(tokenizer: Any) -> dict[str, Any]:
    """Return the configuration of an image model beside those of its two parts."""
    return {
        "tie_word_embeddings": True,
        "image_token_id": _id(tokenizer, IMAGE),
        "video_token_id": _id(tokenizer, VIDEO),
        "vision_start_token_id": _id(tokenizer, VISION_START),
        "vision_end_token_id": _id(tokenizer, VISION_END),
        "dtype": "float32",
    }


def _image_settings() -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "size": {"shortest_edge": SMALLEST_IMAGE, "longest_edge": LARGEST_IMAGE},
        "processor_class": "Qwen3VLProcessor",
    }


@torch.no_grad()
def _fill(network: PreTrainedModel, seed: int) -> None:
    """Fill in random matrices, zero biases, norms that multiply by one; the language model's last by `FINAL_NORM`.

    GPT-OSS, where most parts have a bias, gets random ones, and random sinks. The heads of a gated delta net forget at
    different speeds, with half-lives of one token to some hundred.
    """
    generator = torch.Generator().manual_seed(seed)
    of_text = isinstance(network, Qwen3ForCausalLM | Qwen3MoeForCausalLM | GptOssForCausalLM)
    final_norm = "model.norm.weight" if of_text else "model.language_model.norm.weight"
    adding = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
    norms_add_one = {f"{name}.weight" for name, module in network.named_modules() if type(module).__name__ in adding}
    for name, parameter in network.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(-torch.arange(len(parameter)) * 1.5)
        elif parameter.dim() == 1 and (name.endswith("weight") or not isinstance(network, GptOssForCausalLM)):
            factor = FINAL_NORM if name == final_norm else float(name.endswith("weight"))
            parameter.fill_(factor - 1.0 if name in norms_add_one else factor)
        else:
            _fill_uniform(parameter, _deviation(name, parameter), generator)


def _deviation(name: str, matrix: Tensor) -> float:
    """Standard deviation of a random matrix."""
    if name.endswith("embed_tokens.weight"):
        # The largest logit is then 2 sqrt(hidden), 16 at a width of 64: a trained token can get a probability near 1.
        return 0.4 / math.sqrt(matrix.shape[1])
    if name.endswith(("pos_embed.weight", "bias")):
        return 0.1
    if name.endswith("sinks"):
        return 1.0
    return 1.0 / math.sqrt(matrix.shape[-1] if ".experts." in name else matrix[0].numel())


def _fill_uniform(matrix: Tensor, deviation: float, generator: torch.Generator) -> None:
    # Uniform in [-a, a) has deviation a / sqrt(3). torch.rand gives multiples of 2^-24, so that the subtraction is
    # exact on every machine; normal numbers would go through a logarithm that differs between processors.
    matrix.copy_((torch.rand(matrix.shape, generator=generator) - 0.5) * (2 * math.sqrt(3) * deviation))


def _save_network(kind: TinyKind, network: PreTrainedModel, directory: Path) -> None:
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(directory)
    # named_parameters names a tied matrix once, by its embedding, which is what transformers writes too.
    tensors = dict(_as_published(kind, network.named_parameters()))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _as_published(kind: TinyKind, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters as the family's published files have them.

    Of experts Qwen3 has a matrix each, Qwen3-VL stacks [experts, in, out], and Qwen3.5 stacks [experts, out, in], which
    transformers computes with. When transformers saves, it writes the last two kinds in other ways.
    """
    for name, parameter in parameters:
        if kind == "qwen3-vl-moe" and ".experts." in name:
            yield name, parameter.transpose(1, 2).contiguous()
        elif kind == "qwen3-moe" and ".experts." in name:
            stack, _, matrix = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
            for number, expert in enumerate(parameter):
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{stack}.{number}.{part}.weight", rows.clone()
        else:
            yield name, parameter


def _id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.get_vocab()[token])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The tokenizer: byte-level BPE in the format of the family, with its special tokens and its chat format, so that
# renderers and chat templates made for it work with it. As in the real ones, merges come before special tokens.


def train_tokenizer(vocab: int, text_format: TextFormat = QWEN3) -> Any:
    """A tokenizer of at most `vocab` tokens, the same on every machine.

    Raises ConfigError for a `vocab` without room for every byte.
    """
    smallest = text_format.smallest_vocab
    if vocab < smallest:
        raise ConfigError(f"vocab={vocab} is too small: {BYTES} bytes and the special tokens need at least {smallest}")
    added = (*text_format.special, *text_format.markup)
    ids, merges = _train_bpe(vocab - len(added), text_format)
    # Tokens that have an id already keep it when they are added, so the order here is the order of the ids.
    tokenizer = text_format.tokenizer(
        vocab=ids | {token: len(ids) + position for position, token in enumerate(added)},
        merges=merges,
        eos_token=text_format.ends[0],
        extra_special_tokens=list(text_format.special),
        model_max_length=CONTEXT,
        chat_template=_packaged_text(text_format.chat_template),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in text_format.markup])
    return tokenizer


def _train_bpe(size: int, text_format: TextFormat) -> tuple[dict[str, int], list[Any]]:
    """Ids by token and merges (pairs of texts) in order, for at most `size` tokens."""
    untrained = text_format.tokenizer(vocab={}, merges=[]).backend_tokenizer  # splits text as the family's does
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    untrained.train_from_iterator(_packaged_text("tiny_corpus.txt").splitlines(keepends=True), trainer)
    model = json.loads(untrained.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _packaged_text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
