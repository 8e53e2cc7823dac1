"""When a sequence ends."""

import random

import pytest
from tokenizers.decoders import DecodeStream

from tests.sampling.local.byte_fallback import WORDS, byte_fallback_tokenizer, byte_tokens
from tinsmith.models.base import BaseModel
from tinsmith.sampling.stopping import StopIds, StopStrings, StringMatcher, TextStream


def first_stop(rule: StopIds | StopStrings, tokens: list[int]) -> int | None:
    """How many tokens it takes to stop."""
    for count, token in enumerate(tokens, 1):
        if rule.stops(token):
            return count
    return None


def test_ids_and_strings_end_with_the_token_that_completes_them(text_base: BaseModel) -> None:
    """A string may lie across tokens and inside one. Ids, such as that of the end of sequence, count beside strings."""
    assert first_stop(StopIds([7, 9]), [1, 2, 9, 7]) == 3
    assert first_stop(StopIds([]), [1, 2, 9, 7]) is None
    tokenizer = text_base.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcde"]
    for strings, count in ((("bcd",), 4), (("x", "b"), 2), (("ca",), None)):
        assert first_stop(StopStrings([], strings, tokenizer), letters) == count
    assert first_stop(StopStrings([letters[2]], ("never",), tokenizer), letters) == 3
    for written, string, after in (("Answer: 42\n\nUser: what", "\n\nUser:", " what"), ("a€b", "€", "b")):
        tokens = tokenizer(written)["input_ids"]
        assert first_stop(StopStrings([], (string,), tokenizer), tokens) == len(tokens) - len(tokenizer(after)["input_ids"])


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


def test_strings_that_overlap_are_found_where_the_first_of_them_is_complete() -> None:
    generator = random.Random(0)
    for _ in range(300):
        strings = ["".join(generator.choices("ab€", k=generator.randint(1, 5))) for _ in range(generator.randint(1, 6))]
        text = "".join(generator.choices("ab€", k=40))
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        matcher, state, read = StringMatcher(tuple(strings)), 0, ""
        for piece in pieces:
            state, found = matcher.read(state, piece)
            read += piece
            assert found == any(string in read for string in strings)
            if found:
                break


def test_sequences_of_a_request_share_what_is_large_and_nothing_else(text_base: BaseModel) -> None:
    tokenizer = text_base.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"]
    one = StopStrings([], ("abc",), tokenizer)
    another = one.for_another()
    assert another.strings is one.strings
    assert another.ids is one.ids
    assert [one.stops(token) for token in letters[:2]] == [False, False]
    assert [another.stops(token) for token in letters[2:]] == [False, False]
    assert one.stops(letters[2])


def test_another_error_of_the_decoder_is_raised() -> None:
    stream = TextStream(byte_fallback_tokenizer(WORDS))
    with pytest.raises((TypeError, OverflowError)):
        stream.add(-1)
