"""Calls of tools in an answer, however its text is cut."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.chat.tools import CallForm, ToolCall, ToolCallStream, form_of

WEATHER = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALL = ToolCall("weather", '{"city": "Köln", "days": 2}')
NOW = ToolCall("now", "{}")
ANSWERS: list[tuple[CallForm, str, list[str | ToolCall]]] = [
    ("json", JSON_CALL, [CALL]),
    ("json", f"I look.\n\n{JSON_CALL}\n{JSON_CALL}\n", ["I look.", CALL, CALL]),
    ("json", f'{JSON_CALL} Then\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>', [CALL, " Then", NOW]),
    ("json", " a < b <tool> \n", [" a < b <tool> \n"]),
    ("json", "<tool_call>{broken</tool_call>", ["<tool_call>{broken</tool_call>"]),
    ("json", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ("json", '<tool_call>{"name": "now"', ['<tool_call>{"name": "now"']),
    ("xml", f"\n{XML_CALL}", [CALL]),
    ("xml", "<tool_call><function=now>\n</function></tool_call>", [NOW]),
    ("xml", "<tool_call><function=now>junk</function></tool_call>", []),
]


def read(form: CallForm, pieces: list[str]) -> list[str | ToolCall]:
    stream = ToolCallStream(form, WEATHER)
    found = [each for piece in pieces for each in stream.add(piece)] + stream.end()
    joined: list[str | ToolCall] = []
    for each in found:
        if isinstance(each, str) and joined and isinstance(joined[-1], str):
            joined[-1] += each
        else:
            joined.append(each)
    return joined


@pytest.mark.parametrize(("form", "text", "expected"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_calls_and_texts_are_the_same_however_they_come(
    form: CallForm, text: str, expected: list[str | ToolCall], cuts: list[int]
) -> None:
    """A call of a tool that was not offered, or whose arguments cannot be read, stays text."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert read(form, pieces) == (expected or [text])


def test_the_form_of_calls_is_read_from_the_template() -> None:
    assert form_of("{% if tools %}<tool_call>{{ tool | tojson }}</tool_call>{% endif %}") == "json"
    assert form_of("{% if tools %}<tool_call><function=example>{% endif %}") == "xml"
    assert form_of("{% if tools %}[TOOL_CALLS]{% endif %}") is None
    assert form_of("{{ messages }}") is None


def test_a_value_is_of_the_type_that_its_schema_says() -> None:
    call = XML_CALL.replace("Köln", "12").replace("\n2\n", "\n[2\n")
    assert read("xml", [call]) == [ToolCall("weather", '{"city": "12", "days": "[2"}')]
    odd = ToolCallStream("xml", {"weather": {"properties": ["no object"]}})
    assert odd.add(XML_CALL) == [CALL]


def test_what_is_no_call_is_read_once_however_long_it_is() -> None:
    """A model may write the like up to the end of its context, which keeps others waiting if it is read again."""
    began = time.monotonic()
    for text in ("<tool_call>" + "abcd" * 100_000, "<tool_call>a" + " " * 400_000):
        stream = ToolCallStream("json", {"now": {}})
        found = [part for at in range(0, len(text), 4) for part in stream.add(text[at : at + 4])]
        assert "".join(map(str, [*found, *stream.end()])) == text
    text = "<tool_call><function=now>" + "<parameter=a>" * 30_000 + "</function></tool_call>"
    assert ToolCallStream("xml", {"now": {}}).add(text) == [text]
    assert time.monotonic() - began < 60
