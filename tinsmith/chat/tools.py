"""Calls of tools that a model writes into its answer, found while the text comes."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from tinsmith.chat.text import held_back

CallForm = Literal["json", "xml"]
"""The form of a call between its marks: an object of JSON (Qwen3, Hermes), or elements (Qwen3-Coder, Qwen3.5)."""

MARKS = _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """An object of JSON."""


_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
"""Keys of a JSON schema that limit nothing."""
_MOST_REFERENCES = 16
"""References that lead to each other."""


def followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to in `root`, or itself: if it refers to nothing there, or limits more than that."""
    found = schema
    for _ in range(_MOST_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or found.keys() - {"$ref", *_NOTES}:
            return found
        found = _at(root, reference)
        if not isinstance(found, Mapping):
            return schema
    return schema


def _at(root: Mapping[str, Any], pointer: str) -> Any:
    """The part of a schema that a JSON pointer leads to; None if there is none."""
    found: Any = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if pointer == "#" or pointer.startswith("#/") else None


def form_of(template: str) -> CallForm | None:
    """Return the form in which a chat template lets the model call tools; None if it is none that is known here."""
    if "tools" not in template or _OPEN not in template:
        return None
    return "xml" if "<function=" in template else "json"


class ToolCallStream:
    """Divides an answer into text and calls.

    What stands between the marks of a call and is none stays text. White space before and behind calls is left out.
    """

    def __init__(self, form: CallForm, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """`parameters` are the JSON schemas of the tools' arguments, by the name of the tool."""
        self._form = form
        self._parameters = parameters
        self._text = ""
        """Text that may begin a mark."""
        self._call: list[str] = []
        """Text behind the opening mark of a call, if `_inside`."""
        self._inside = False
        self._space: list[str] = []
        """White space that waits for more text."""
        self._called = False

    def add(self, text: str) -> list[str | ToolCall]:
        """Return the texts and calls that are certain now and were not before, in order."""
        self._text += text
        found: list[str | ToolCall] = []
        while True:
            mark = _CLOSE if self._inside else _OPEN
            at = self._text.find(mark)
            if at < 0:
                break
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            if self._inside:
                before = "".join([*self._call, before])
                self._call.clear()
                found.append(self._read(before) or self._said(_OPEN + before + _CLOSE))
            else:
                found.append(self._said(before))
            self._inside = not self._inside
        certain = len(self._text) - held_back(self._text, [mark])
        passed, self._text = self._text[:certain], self._text[certain:]
        if self._inside:
            self._call.append(passed)
        else:
            found.append(self._said(passed))
        return [each for each in found if each]

    def end(self) -> list[str | ToolCall]:
        """Return what was held back, when no more text comes."""
        text = self._said("".join([_OPEN, *self._call, self._text]) if self._inside else self._text)
        if not self._called:
            text += "".join(self._space)
        return [text] if text else []

    def _said(self, text: str) -> str:
        """Return text that is none of a call, without the white space at its end, which waits for more text."""
        kept = text.rstrip()
        if kept:
            kept = "".join([*self._space, kept])
            self._space.clear()
            text = text[len(text.rstrip()) :]
        self._space.append(text)
        return kept

    def _read(self, text: str) -> ToolCall | None:
        call = self._read_json(text) if self._form == "json" else self._read_xml(text)
        if call is not None:
            self._space, self._called = [], True
        return call

    def _read_json(self, text: str) -> ToolCall | None:
        with suppress(ValueError, RecursionError):
            match json.loads(text):
                case {"name": str(name), "arguments": dict(arguments)} if name in self._parameters:
                    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        return None

    def _read_xml(self, text: str) -> ToolCall | None:
        function = _FUNCTION.fullmatch(text)
        if function is None or function[1] not in self._parameters:
            return None
        arguments = self._parameters[function[1]]
        schemas = arguments.get("properties")
        types = schemas if isinstance(schemas, Mapping) else {}
        given, end = {}, 0
        while parameter := _PARAMETER.match(function[2], end):
            name, value = parameter.groups()
            given[name], end = _value(value, followed(types.get(name), arguments)), parameter.end()
        if function[2][end:].strip():
            return None
        return ToolCall(function[1], json.dumps(given, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: a text if its schema says so, else as JSON where it is that."""
    if not (isinstance(schema, Mapping) and schema.get("type") == "string"):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return text
