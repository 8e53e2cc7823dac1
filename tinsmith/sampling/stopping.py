"""Decides when a generated sequence ends: end-of-sequence ids, the request's stop ids, or its stop strings."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from tokenizers.decoders import DecodeStream

from tinsmith.wire.sample import StopRule

_INVALID_PREFIX = "Invalid prefix encountered"
"""Prefix of `DecodeStream`'s message when later tokens change text that it has already given out."""


def stop_rule(rule: StopRule, eos: Iterable[int], tokenizer: Any) -> "StopIds | StopStrings":
    """Return the rule that ends the sequences of a request; `eos` are the model's end-of-sequence tokens."""
    ids = (*rule.token_ids, *(eos if rule.eos else ()))
    return StopStrings(ids, rule.strings, tokenizer) if rule.strings else StopIds(ids)


class StopIds:
    """Stops at one of a set of token ids. It remembers nothing, so that all sequences of a request share it."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        return token in self.ids

    def for_another(self) -> Self:
        """The rule for another sequence of the request."""
        return self


class StopStrings:
    """Stops at a token id, or as soon as the generated text contains one of the strings. Fed every token of one sequence, in order."""

    def __init__(self, ids: Iterable[int], strings: tuple[str, ...], tokenizer: Any) -> None:
        self.ids = frozenset(ids)
        self.strings = StringMatcher(strings)
        self.tokenizer = tokenizer
        self.text = TextStream(tokenizer)
        self.matched = 0

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        if token in self.ids:
            return True
        self.matched, found = self.strings.read(self.matched, self.text.add(token))
        return found

    def for_another(self) -> "StopStrings":
        """The rule for another sequence of the request, which shares what is large."""
        another = StopStrings((), (), self.tokenizer)
        another.ids, another.strings = self.ids, self.strings
        return another


class StringMatcher:
    """Finds any of some strings in text that comes in pieces, one step for each character however many strings there are.

    The automaton of Aho and Corasick (1975). Its states are the beginnings of the strings, 0 is the empty one.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        """The automaton is built when text is first read: requests that wait hold their strings alone."""
        self.strings = strings
        self.longer: list[dict[str, int]] = []
        """For each state, the states that are one character longer."""
        self.complete: list[bool] = []
        """Whether a state ends with one of the strings."""
        self.shorter: list[int] = []
        """For each state, the longest other state that it ends with."""

    def _build(self) -> None:
        self.longer, self.complete = [{}], [False]
        for string in self.strings:
            self._add(string)
        self.shorter = [0] * len(self.longer)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self.longer[state]:
                self.longer[state][character] = len(self.longer)
                self.longer.append({})
                self.complete.append(False)
            state = self.longer[state][character]
        self.complete[state] = True

    def _link(self) -> None:
        states = deque(self.longer[0].values())
        while states:  # shorter ones first
            state = states.popleft()
            self.complete[state] |= self.complete[self.shorter[state]]
            for character, longer in self.longer[state].items():
                self.shorter[longer] = self._step(self.shorter[state], character)
                states.append(longer)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self.longer[state]:
            state = self.shorter[state]
        return self.longer[state].get(character, 0)

    def read(self, state: int, text: str) -> tuple[int, bool]:
        """The state after more text, and whether one of the strings is complete somewhere in it. A text begins in state 0."""
        if not self.longer:
            self._build()
        for character in text:
            state = self._step(state, character)
            if self.complete[state]:
                return state, True
        return state, False


class TextStream:
    """The text of a sequence of tokens, as far as it is certain.

    Tokenizers with byte fallback (Gemma, Llama 2, Phi-3) have a token for each byte and read neighbouring bytes together: a byte that is a
    letter by itself becomes a replacement character when a byte follows that makes the run invalid UTF-8. `DecodeStream` has given out the
    letter by then and raises at this token and at every later one. The text given out stays, and a new stream begins with the tokens whose
    text is not given out yet.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.stream = _new_stream()
        self.unread: list[int] = []
        """Tokens whose text is not given out yet, because the next token may change it."""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.unread.append(token)
        try:
            text = self.stream.step(self.backend, token)
        except Exception as error:  # the library raises this very class
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            text = self._begin_anew()
        if text:
            self.unread.clear()
        return text or ""

    def _begin_anew(self) -> str:
        self.stream = _new_stream()
        return "".join(self.stream.step(self.backend, token) or "" for token in self.unread)


def _new_stream() -> DecodeStream:
    return DecodeStream(skip_special_tokens=False)
