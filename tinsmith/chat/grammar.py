"""Grammars that answers keep to: JSON of a schema, and calls of tools. llguidance says which tokens may come next.

A grammar is a text in Lark's form. llguidance reads it here and inside vLLM.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tinsmith.errors import ParameterError, UserError

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of every object of JSON."""
_LONGEST = 2**17
"""Characters of a grammar."""
_SPACE = r"[ \n]{0,32}"
"""White space between parts of JSON. Without a limit, some models write nothing else."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that keeps to a schema."""
    return f"start: {_json(schema)}"


def call_grammar(schemas: Mapping[str, Mapping[str, Any]], most: int | None) -> str:
    """Return the grammar of calls of these tools, as `form_of` calls `json`; at most so many, and at least one.

    `schemas` are those of the arguments, by the name of the tool.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"type": "object", **schema}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    rules = [f"call{number}: {_json(each)}" for number, each in enumerate(calls)]
    names = " | ".join(f"call{number}" for number in range(len(calls)))
    again = '("\\n" call)*' if most is None else ""
    return "\n".join([f"start: call {again}", f'call: "<tool_call>\\n" ({names}) "\\n</tool_call>"', *rules])


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})


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
        state = GrammarState(LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0))
        state.check()
        return state


class GrammarState:
    """How far an answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "GrammarState":
        """Return the same state for another answer."""
        return GrammarState(self._matcher.deep_copy())

    def add(self, token: int) -> None:
        """Go on with a token. Raises UserError if the grammar has none like it here."""
        self._matcher.consume_token(token)
        self.check()

    def mask(self, words: int) -> NDArray[np.int32]:
        """Return the tokens that may come next as bits, the lowest first."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self.check()
        return found[:words]

    def check(self) -> None:
        """Raise UserError if the grammar is too large, or was left."""
        if self._matcher.is_error():
            fault = self._matcher.get_error().splitlines()[0]
            raise UserError(f"response_format: the answer cannot be held to it: {fault}; simplify the schema")
