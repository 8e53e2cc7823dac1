"""When a sequence ends."""

import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from tinsmith.chat.text import TextStream
from tinsmith.models.base import BaseModel
from tinsmith.sampling.stopping import StopIds, StopStrings, StringMatcher


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
        assert first_stop(StopStrings([], (string,), tokenizer), tokens) == len(tokens) - len(
            tokenizer(after)["input_ids"]
        )


def byte_tokens(data: bytes) -> list[str]:
    """The tokens that spell these bytes."""
    return [f"<0x{byte:02X}>" for byte in data]


@pytest.fixture
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer that spells unknown characters byte by byte, as those of Gemma, Llama 2 and Phi-3 do."""
    words = ["<unk>", *byte_tokens(bytes(range(256))), "▁", "a", "b", "▁x", "▁world", "€"]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces, start = decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), start])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_bytes_that_are_no_utf8_end_neither_the_sequence_nor_its_stop_strings(
    byte_fallback: PreTrainedTokenizerFast,
) -> None:
    """A letter is given out when its byte comes; a byte behind it that makes the run invalid would turn it into a
    replacement character."""
    spelled = ["a", *byte_tokens(b"A\xff"), "▁x", "▁world", *byte_tokens("€".encode()), "b"]
    tokens: Any = byte_fallback.convert_tokens_to_ids(spelled)
    plain = DecodeStream(skip_special_tokens=False)
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        [plain.step(byte_fallback.backend_tokenizer, token) for token in tokens]
    stream = TextStream(byte_fallback.backend_tokenizer)
    assert [stream.add(token) for token in tokens] == [
        "a",
        "A",
        "",
        "\N{REPLACEMENT CHARACTER} x",
        " world",
        "",
        "",
        "€",
        "b",
    ]
    for string, count in (("world€b", len(tokens)), ("A", 2), ("never", None)):
        assert first_stop(StopStrings([], (string,), byte_fallback), tokens) == count
    with pytest.raises((TypeError, OverflowError)):  # another error of the library is no end of a text
        stream.add(-1)


def test_strings_that_overlap_are_found_where_the_first_of_them_is_complete() -> None:
    generator = random.Random(0)
    for _ in range(300):
        strings = ["".join(generator.choices("ab€", k=generator.randint(1, 5))) for _ in range(generator.randint(1, 6))]
        text = "".join(generator.choices("ab€", k=40))
        matcher, state = StringMatcher(tuple(strings)), 0
        for start in range(0, len(text), 3):
            state, found = matcher.read(state, text[start : start + 3])
            assert found == any(string in text[: start + 3] for string in strings)
            if found:
                break


def test_sequences_of_a_request_share_what_is_large_and_nothing_that_changes(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is large is made once, too, and not at every token."""
    built: list[StringMatcher] = []
    build = StringMatcher._build

    def counted(matcher: StringMatcher) -> None:
        built.append(matcher)
        build(matcher)

    monkeypatch.setattr(StringMatcher, "_build", counted)
    tokenizer = text_base.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"]
    one = StopStrings([], ("abc",), tokenizer)
    another = one.for_another()
    assert [one.stops(token) for token in letters[:2]] == [False, False]
    assert [another.stops(token) for token in letters[2:]] == [False, False]
    assert one.stops(letters[2])
    assert another.ids is one.ids
    plain = StopIds([7])
    assert plain.for_another().ids is plain.ids
    assert built == [one.strings] == [another.strings]


def test_many_long_strings_cost_a_token_hardly_more_than_one_short(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may ask for 256 strings that all but occur in what is sampled, and other requests wait for each of its
    tokens."""
    monkeypatch.setattr(TextStream, "add", lambda *_: "a" * 128)

    def seconds(strings: list[str]) -> float:
        rule = StopStrings([], tuple(strings), text_base.tokenizer)
        assert not rule.stops(0)
        took: list[float] = []
        for _ in range(20):
            began = time.perf_counter()
            assert not rule.stops(0)
            took.append(time.perf_counter() - began)
        return min(took)

    assert seconds([f"{'a' * 7}{chr(200 + i)}{'a' * 8}" for i in range(256)]) < 4 * seconds(["never"])
