"""Grammars of answers: what they let a model write, and what they do not."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.bases import write_family
from tinsmith.chat.grammar import Grammars, call_grammar, check_grammar, json_grammar
from tinsmith.chat.template import ChatFormat
from tinsmith.chat.tools import CallForm, ToolCall, ToolCallStream
from tinsmith.errors import ParameterError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {"weather": SCHEMA, "now": {}}
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <b>\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("qwen3")
    write_family("qwen3", directory)
    return ChatFormat(str(directory))


@pytest.fixture(scope="module")
def accepts(model: ChatFormat) -> Callable[[str, str], bool]:
    """Whether a grammar takes a whole text, token by token, and its end behind it."""
    end = model.stop_ids[0]
    grammars = Grammars(model.tokenizer, 2050, [end])

    def check(grammar: str, text: str) -> bool:
        state = grammars.begin(grammar)
        for token in [*model.tokenizer.encode(text, add_special_tokens=False).ids, end]:
            bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
            if not bits[token]:
                return False
            state.add(token)
        return True

    return check


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"city": "Köln"}', True),
        ('{\n  "city": "a \\" b",\n  "days": -3,\n  "unit": "F"\n}', True),
        ('{"days": 3}', False),
        ('{"city": 3}', False),
        ('{"city": "a", "unit": "K"}', False),
        ('{"city": "a", "more": 1}', False),
        ('{"city": "a"} so', False),
        (" " * 99 + '{"city": "a"}', False),
    ],
)
def test_an_answer_is_json_of_the_schema(accepts: Callable[[str, str], bool], text: str, fits: bool) -> None:
    assert accepts(json_grammar(SCHEMA), text) is fits
    if fits:
        json.loads(text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", JSON_CALL),
        ("xml", XML_CALL),
        ("json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ],
)
def test_a_required_call_is_one_that_can_be_read(
    model: ChatFormat, accepts: Callable[[str, str], bool], form: CallForm, text: str
) -> None:
    model.calls = form
    one, several = call_grammar(model, TOOLS, 1), call_grammar(model, TOOLS, None)
    assert accepts(one, text)
    (call,) = [*ToolCallStream(form, TOOLS).add(text)]
    assert isinstance(call, ToolCall)
    assert accepts(several, f"{text}\n{text}")
    assert not accepts(one, f"{text}\n{text}")
    for wrong in ("I look.", text.replace("weather", "other").replace("now", "other"), text[:-1], f"{text} Then"):
        assert not accepts(several, wrong), wrong


def test_a_schema_that_cannot_be_kept_to_is_refused() -> None:
    for schema in ({"type": "obj"}, {"type": "string", "pattern": "(?=a)b"}, {"enum": ["a" * 2**17]}):
        with pytest.raises(ParameterError, match="schema") as refused:
            check_grammar("response_format", json_grammar(schema))
        assert refused.value.parameter == "response_format"


def test_a_name_that_is_no_word_is_refused(model: ChatFormat) -> None:
    model.calls = "xml"
    wrong: list[dict[str, dict[str, Any]]] = [{"a b": {}}, {"a": {"properties": {">\n": {}}}}]
    for tools in wrong:
        with pytest.raises(ParameterError, match="is no name"):
            call_grammar(model, tools, 1)


def test_a_schema_that_takes_long_is_refused(model: ChatFormat) -> None:
    """llguidance would build a state for each remainder, for seconds or hours."""
    model.calls = "json"
    for schema in (
        {"type": "integer", "multipleOf": 1000003},
        {"type": "integer", "multipleOf": 10**400},
        {"type": "number", "multipleOf": 1e-300},
        {"type": "array", "items": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 101}]}},
    ):
        with pytest.raises(ParameterError, match="multipleOf"):
            json_grammar(schema)
        with pytest.raises(ParameterError, match="multipleOf"):
            call_grammar(model, {"f": schema}, 1)
    json_grammar({"properties": {"price": {"multipleOf": 0.01}, "multipleOf": {"type": "integer", "multipleOf": 50}}})


def test_tools_that_are_no_schema_are_refused(model: ChatFormat) -> None:
    model.calls = "xml"
    wrong: list[dict[str, Any]] = [
        {"properties": [1]},
        {"properties": 5},
        {"required": 5, "properties": {"a": {}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "string", "pattern": "a+"}}},
    ]
    for schema in wrong:
        with pytest.raises(ParameterError):
            check_grammar("tools", call_grammar(model, {"f": schema}, 1))


def test_a_constant_parameter_is_obeyed(model: ChatFormat, accepts: Callable[[str, str], bool]) -> None:
    model.calls = "xml"
    grammar = call_grammar(model, {"weather": {"properties": {"city": {"type": "string", "const": "Bonn"}}}}, 1)
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("Bonn", "Köln"))


def test_an_answer_may_end_with_the_stop_tokens_of_its_request(model: ChatFormat) -> None:
    model.calls = "json"
    stop = model.tokenizer.encode("a", add_special_tokens=False).ids[0]
    state = Grammars(model.tokenizer, 2050, model.stop_ids).begin(call_grammar(model, {"now": {}}, None))

    def may_stop() -> bool:
        return bool(np.unpackbits(state.mask([stop]).view(np.uint8), bitorder="little")[stop])

    assert not may_stop()
    for token in model.tokenizer.encode(
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', add_special_tokens=False
    ).ids:
        state.add(token)
    assert may_stop()


REFERRING: dict[str, Any] = {
    "$defs": {
        "City": {"type": "string", "enum": ["Rome", "5"]},
        "Node": {
            "type": "object",
            "properties": {"$ref": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["$ref"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "city": {"$ref": "#/$defs/City", "description": "of a country"},
        "path": {"$ref": "#/$defs/Node"},
        "cities": {"type": "array", "items": {"$ref": "#/$defs/City"}},
        "home": {"$ref": "#/properties/city"},
        "kept": {"const": {"$ref": "#"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"city": "5"}, True),
        ({"city": "Bonn"}, False),
        ({"city": "5", "path": {"$ref": 1, "next": {"$ref": 2}}}, True),
        ({"city": "5", "path": {"$ref": 1, "next": {"$ref": "2"}}}, False),
        ({"city": "5", "cities": ["Rome"]}, True),
        ({"city": "5", "cities": ["Bonn"]}, False),
        ({"city": "5", "home": "Rome"}, True),
        ({"city": "5", "home": "Bonn"}, False),
        ({"city": "5", "kept": {"$ref": "#"}}, True),
    ],
)
def test_references_of_a_tool_are_followed(
    model: ChatFormat, accepts: Callable[[str, str], bool], form: CallForm, arguments: dict[str, Any], fits: bool
) -> None:
    model.calls, tools = form, {"f": REFERRING}
    text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    if form == "xml":
        shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
        written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in shown.items())
        text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    assert accepts(call_grammar(model, tools, 1), text) is fits
    (call,) = ToolCallStream(form, tools).add(text)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.parametrize("reference", ["#/$defs/None", "http://x/y", "#a"])
def test_a_reference_to_nothing_is_refused(model: ChatFormat, form: CallForm, reference: str) -> None:
    model.calls = form
    schema: dict[str, Any] = {"properties": {"a": {"$ref": reference}}}
    with pytest.raises(ParameterError, match=r"^tools: an answer cannot be held to this schema"):
        check_grammar("tools", call_grammar(model, {"f": schema}, 1))
