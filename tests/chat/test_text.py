"""Text of answers as it comes: whole characters, and nothing from a stop string on."""

from hypothesis import given
from hypothesis import strategies as st

from tinsmith.chat.text import AnswerText, TextStream, held_back
from tinsmith.models.base import BaseModel


def parts_of(base: BaseModel, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    """What is given out with each token, and at the end."""
    answer = AnswerText(base.tokenizer.backend_tokenizer, stops)
    return [*[answer.add([token]) for token in tokens], answer.end()]


def ids(base: BaseModel, text: str) -> list[int]:
    found: list[int] = base.tokenizer.encode(text, add_special_tokens=False)
    return found


def test_a_character_of_several_tokens_comes_whole(text_base: BaseModel) -> None:
    tokens = ids(text_base, "a😀b")
    assert len(tokens) == 6
    assert parts_of(text_base, tokens) == ["a", "", "", "", "😀", "b", ""]
    assert parts_of(text_base, tokens[:3]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_what_is_no_character_is_given_out_before_it_is_long(text_base: BaseModel) -> None:
    invalid = ids(text_base, "😀")[1]
    tokens = [*[invalid] * 1000, *ids(text_base, "a😀"), *[invalid] * 70]
    stream = TextStream(text_base.tokenizer.backend_tokenizer)
    text = ""
    for token in tokens:
        text += stream.add(token)
        assert len(stream.unread) < 40, "each token decodes all that wait"
    assert text + stream.rest() == text_base.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)


def test_special_tokens_are_no_text(text_base: BaseModel) -> None:
    tokens = ids(text_base, "a<|im_end|>b")
    assert len(tokens) == 3
    assert parts_of(text_base, tokens) == ["a", "", "b", ""]
    silent = AnswerText(text_base.tokenizer.backend_tokenizer, silent=ids(text_base, "b"))
    assert silent.add(tokens) + silent.end() == "a"


def test_what_may_begin_a_stop_string_waits_and_the_stop_string_never_comes(text_base: BaseModel) -> None:
    a, b, c = (ids(text_base, letter) for letter in "abc")
    assert parts_of(text_base, [*a, *b, *c], ("bx", "abd")) == ["", "", "abc", ""]
    assert parts_of(text_base, [*a, *a, *b], ("ab",)) == ["", "a", "", ""]
    assert parts_of(text_base, [*a, *b, *c, *a], ("c", "never")) == ["a", "b", "", "", ""]
    assert parts_of(text_base, [*a, *b], ("abc",)) == ["", "", "ab"]
    assert [held_back("xab", stops) for stops in (["abc"], ["b"], ["bc", "abcd"], [])] == [2, 0, 2, 0]


@given(
    tokens=st.lists(st.integers(0, 2020), max_size=30),
    stops=st.lists(st.text("abe €", min_size=1, max_size=3), max_size=3),
)
def test_parts_are_the_text_up_to_the_first_stop_string(
    text_base: BaseModel, tokens: list[int], stops: list[str]
) -> None:
    whole = text_base.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
    found = "".join(parts_of(text_base, tokens, tuple(stops)))
    assert whole.startswith(found)
    assert not any(stop in found for stop in stops)
    if found != whole:
        assert any(whole[len(found) :].startswith(stop) for stop in stops)
