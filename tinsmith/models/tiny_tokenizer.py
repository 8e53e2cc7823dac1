"""Small byte-level BPE tokenizers in the formats of Qwen3 and Qwen3.5, trained on the spot on the text that lies beside this module.

Each splits text as the real one does, and has its special tokens for text and images and its chat format, so that renderers and chat
templates made for Qwen work with it. Ids: merges first, special tokens behind them, as in the real ones.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer, Qwen3_5Tokenizer

from tinsmith.errors import ConfigError

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

SPECIAL_TOKENS = (
    *(END_OF_TEXT, START_OF_TURN, END_OF_TURN, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO),
)
"""Tokens that `skip_special_tokens` leaves out of decoded text."""

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Added tokens that stay visible in decoded text: a client parses them."""

CONTEXT = 32768
"""Longest sequence of a tiny model, in tokens."""

BYTES = 256
SMALLEST_VOCAB = BYTES + len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)

TinyTokenizer = Qwen2Tokenizer | Qwen3_5Tokenizer


@dataclass(frozen=True)
class TextFormat:
    """A family's rules for splitting text into tokens and for writing conversations."""

    tokenizer: type[TinyTokenizer]
    chat_template: str
    """Name of the file beside this module."""


QWEN3 = TextFormat(Qwen2Tokenizer, "tiny_chat.jinja")
QWEN3_5 = TextFormat(Qwen3_5Tokenizer, "tiny_chat_qwen3_5.jinja")


def train_tokenizer(vocab: int, text_format: TextFormat = QWEN3) -> TinyTokenizer:
    """A tokenizer of at most `vocab` tokens, the same on every machine. Raises ConfigError for a `vocab` without room for every byte."""
    if vocab < SMALLEST_VOCAB:
        raise ConfigError(f"vocab={vocab} is too small: {BYTES} bytes and the special tokens need at least {SMALLEST_VOCAB}")
    added = (*SPECIAL_TOKENS, *MARKUP_TOKENS)
    ids, merges = _train_bpe(vocab - len(added), text_format)
    # Tokens that have an id already keep it when they are added, so the order here is the order of the ids.
    tokenizer = text_format.tokenizer(
        vocab=ids | {token: len(ids) + position for position, token in enumerate(added)},
        merges=merges,
        eos_token=END_OF_TURN,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=CONTEXT,
        chat_template=_packaged_text(text_format.chat_template),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def _train_bpe(size: int, text_format: TextFormat) -> tuple[dict[str, int], list[Any]]:
    """Ids by token and merges (pairs of texts) in order, for at most `size` tokens."""
    untrained = text_format.tokenizer(vocab={}, merges=[]).backend_tokenizer  # splits text as the family's does
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    untrained.train_from_iterator(_packaged_text("tiny_corpus.txt").splitlines(keepends=True), trainer)
    model = json.loads(untrained.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _packaged_text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
