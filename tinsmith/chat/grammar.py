"""Grammars that answers keep to: JSON of a schema, and calls of tools. llguidance says which tokens may come next.

A grammar is a text in Lark's form. llguidance reads it here and inside vLLM.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tinsmith.chat.template import ChatFormat
from tinsmith.chat.tools import MARKS, followed
from tinsmith.errors import ParameterError, UserError, quoted

_NAME = re.compile(r"[\w.-]+")
_OF_STRINGS = {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "$ref", "not"}
"""Keys of a JSON schema that limit a string."""
_ARGUMENTS, _ROOT = "#/properties/arguments", "#/$defs/root"
"""Places of the schema of a tool's arguments in that of a call, and in that of one parameter."""
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keys of a JSON schema behind which schemas stand by name."""
_VALUES = {"const", "enum", "default", "examples"}
"""Keys of a JSON schema behind which values stand."""
_LONGEST = 2**17
"""Characters of a grammar."""
_MOST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf`: llguidance builds as many states, whatever its limits."""
_MOST_DIGITS = 9
"""Digits of a `multipleOf` behind the point."""
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=50_000, precompute_large_lexemes=False)
"""Bound the time of a step, which all running sequences share, and memory."""
_SPACE = r"[ \n]{0,32}"
"""White space between parts of JSON. Without a limit, some models write nothing else."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that keeps to a schema."""
    return f"start: {_json(schema)}"


def call_grammar(model: ChatFormat, schemas: Mapping[str, Mapping[str, Any]], most: int | None) -> str:
    """Return the grammar of calls of these tools in the form of the model; at least one, at most so many.

    `schemas` are those of the arguments, by the name of the tool. Raises ParameterError for a name that is no word.
    """
    # llguidance knows a token that looks like a mark by this name alone
    opened, closed = (mark if model.tokenizer.token_to_id(mark) is not None else _text(mark) for mark in MARKS)
    rules, calls = list[str](), list[str]()
    for number, (name, schema) in enumerate(schemas.items()):
        if not _NAME.fullmatch(name):
            raise ParameterError(f"tools: {quoted(name)} is no name of a function; use letters, digits, _ and -")
        calls.append(f"call{number}")
        rules += _xml_call(number, name, schema) if model.calls == "xml" else [_json_call(number, name, schema)]
    again = '("\\n" call)*' if most is None else ""
    one = f'call: {opened} "\\n" ({" | ".join(calls)}) "\\n" {closed}'
    return "\n".join([f"start: call {again}", one, *rules])


def _json_call(number: int, name: str, schema: Mapping[str, Any]) -> str:
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object", **_moved(schema, _ARGUMENTS)}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return f"call{number}: {_json(call)}"


def _xml_call(number: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Parameters come in the order of the schema."""
    parts, rules = [_text(f"<function={name}>\n")], []
    needed, properties = schema.get("required") or [], schema.get("properties") or {}
    if not isinstance(needed, list) or not isinstance(properties, Mapping):
        raise ParameterError(f"tools: required of {name} is no list, or properties no object; send a JSON schema")
    for index, (parameter, of_value) in enumerate(properties.items()):
        if not _NAME.fullmatch(parameter):
            raise ParameterError(f"tools: {quoted(parameter)} is no name of a parameter; use letters, digits, _ and -")
        rule, end = f"value{number}x{index}", _text("\n</parameter>\n")
        of_value = followed(of_value, schema)
        of_value = of_value if isinstance(of_value, Mapping) else {}
        listed = [of_value["const"]] if "const" in of_value else of_value.get("enum")
        if isinstance(listed, list) and listed and all(isinstance(each, str) for each in listed):
            rules.append(f"{rule}: ({' | '.join(map(_text, listed))}) {end}")
        elif of_value.get("type") == "string" and listed is None:
            if limits := of_value.keys() & _OF_STRINGS:
                raise ParameterError(
                    f"tools: {min(limits)} of {quoted(parameter)}: this model writes strings as they are, which are "
                    "held to enum or const alone; leave it out"
                )
            rules.append(f"{rule}[suffix={end}]: /(?s:.*)/")
        else:
            rules.append(f"{rule}: {_json(_alone(of_value, schema))} {end}")
        part = f"({_text(f'<parameter={parameter}>' + chr(10))} {rule})"
        parts.append(part if parameter in needed else f"{part}?")
    return [f"call{number}: {' '.join(parts)} {_text('</function>')}", *rules]


def _alone(of_value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a parameter with all that it refers to."""
    moved = _moved(of_value, _ROOT)
    return of_value if moved == of_value else {**moved, "$defs": {"root": _moved(schema, _ROOT)}}


def _moved(schema: Any, place: str, is_schema: bool = True) -> Any:
    """A schema whose references are right where its root stands at this place of another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place, not (is_schema and key in _BY_NAME)) for key, value in schema.items()}
    if is_schema:
        moved |= {key: value for key, value in schema.items() if key in _VALUES}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
    return moved


def _text(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    found = [Decimal(str(each)) for each in _multiples(schema)]
    digits = min([0, *(int(each.as_tuple().exponent) for each in found)])
    if max(map(abs, found), default=0) > _MOST_MULTIPLE or digits < -_MOST_DIGITS:
        common = math.inf
    else:
        common = math.lcm(*(int(each.scaleb(-digits)) for each in found))
    if common > _MOST_MULTIPLE:
        raise ParameterError(
            f"multipleOf: an answer cannot be held to numbers whose common multiple is above {_MOST_MULTIPLE}; "
            "simplify the schema"
        )
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})


def _multiples(schema: Any) -> Iterator[float]:
    """The values of `multipleOf`, however deep."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "multipleOf" and isinstance(value, int | float):
                yield value
            else:
                yield from _multiples(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _multiples(each)


def check_grammar(parameter: str, grammar: str) -> None:
    """Raise ParameterError if llguidance cannot hold an answer to a grammar."""
    if len(grammar) > _LONGEST:
        raise ParameterError(f"{parameter}: the schemas have {len(grammar)} characters; send at most {_LONGEST}")
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if fault:
        raise ParameterError(
            f"{parameter}: an answer cannot be held to this schema: {fault.splitlines()[0]}; simplify it"
        )


class Grammars:
    """Begins grammars for answers of one model."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Iterable[int]) -> None:
        """`vocabulary` is the number of logits, `ends` are the tokens that end an answer."""
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocabulary, eos_token=sorted(ends))

    def begin(self, grammar: str) -> "GrammarState":
        """Return the state at the beginning of an answer. Raises UserError."""
        state = GrammarState(
            LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
        )
        state.check()
        state.mask()  # what fails at once fails here, not amid a pass over the prompts of others
        return state


class GrammarState:
    """The place of an answer in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "GrammarState":
        """Return the same state for another answer."""
        return GrammarState(self._matcher.deep_copy())

    def add(self, token: int) -> None:
        """Go on with a token. Raises UserError if the grammar has none like it here."""
        self._matcher.consume_token(token)
        self.check()

    def mask(self, ends: Collection[int] = ()) -> NDArray[np.int32]:
        """Return the tokens that may come next as bits, the lowest first. Raises UserError.

        `ends` end the answer too, where it may end.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self.check()
        if ends and self._matcher.is_accepting():
            found = found.copy()
            for token in ends:
                if token < 32 * len(found):
                    found.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return found

    def check(self) -> None:
        """Raise UserError if the grammar is too large, or was left."""
        if self._matcher.is_error():
            fault = self._matcher.get_error().splitlines()[0]
            raise UserError(f"response_format: the answer cannot be held to it: {fault}; simplify the schema")
