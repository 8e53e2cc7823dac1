"""When a sequence ends."""

import pytest
from tokenizers.decoders import DecodeStream

from tests.sampling.local.byte_fallback import WORDS, byte_fallback_tokenizer, byte_tokens
from tinsmith.models.base import BaseModel
from tinsmith.sampling.stopping import StopIds, StopStrings, TextStream


def first_stop(rule: StopIds | StopStrings, tokens: list[int]) -> int | None:
    """How many tokens it takes to stop."""
    for count, token in enumerate(tokens, 1):
        if rule.stops(token):
            return count
    return None


def test_ids() -> None:
    assert first_stop(StopIds([7, 9]), [1, 2, 9, 7]) == 3
    assert first_stop(StopIds([]), [1, 2, 9, 7]) is None


def test_strings_end_with_the_token_that_completes_them(text_base: BaseModel) -> None:
    tokenizer = text_base.tokenizer
    tokens = tokenizer("Answer: 42\n\nUser: what")["input_ids"]
    count = first_stop(StopStrings([], ("\n\nUser:",), tokenizer), tokens)
    assert count is not None
    assert "\n\nUser:" in tokenizer.decode(tokens[:count])
    assert "\n\nUser:" not in tokenizer.decode(tokens[: count - 1])


def test_a_string_may_lie_across_tokens_and_inside_one(text_base: BaseModel) -> None:
    tokenizer = text_base.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcde"]
    assert first_stop(StopStrings([], ("bcd",), tokenizer), letters) == 4
    assert first_stop(StopStrings([], ("x", "b"), tokenizer), letters) == 2
    assert first_stop(StopStrings([], ("ca",), tokenizer), letters) is None


def test_a_character_of_several_tokens_is_seen_when_complete(text_base: BaseModel) -> None:
    tokenizer = text_base.tokenizer
    tokens = tokenizer("a€b")["input_ids"]
    assert first_stop(StopStrings([], ("€",), tokenizer), tokens) == len(tokens) - 1


def test_end_of_sequence_still_ends_a_request_with_strings(text_base: BaseModel) -> None:
    eos = next(iter(text_base.eos_token_ids()))
    assert first_stop(StopStrings([eos], ("never",), text_base.tokenizer), [1, 2, eos]) == 3


def test_bytes_that_are_no_utf8_end_neither_the_sequence_nor_its_stop_strings() -> None:
    """A letter is given out when its byte comes; a byte behind it that makes the run invalid would turn it into a replacement character."""
    tokenizer = byte_fallback_tokenizer(WORDS)
    vocabulary = tokenizer.get_vocab()
    spelled = ["a", *byte_tokens(b"A\xff"), "▁x", "▁world", *byte_tokens("€".encode()), "b"]
    tokens = [vocabulary[token] for token in spelled]
    plain = DecodeStream(skip_special_tokens=False)
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        [plain.step(tokenizer.backend_tokenizer, token) for token in tokens]
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokens] == ["a", "A", "", "\N{REPLACEMENT CHARACTER} x", " world", "", "", "€", "b"]
    assert tokenizer.decode(tokens) == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} x world€b"
    assert first_stop(StopStrings([], ("world€b",), tokenizer), tokens) == len(tokens)
    assert first_stop(StopStrings([], ("A",), tokenizer), tokens) == 2
    assert first_stop(StopStrings([], ("never",), tokenizer), tokens) is None


def test_another_error_of_the_decoder_is_raised() -> None:
    stream = TextStream(byte_fallback_tokenizer(WORDS))
    with pytest.raises((TypeError, OverflowError)):
        stream.add(-1)
