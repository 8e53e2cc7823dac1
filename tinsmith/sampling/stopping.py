"""Decides when a sequence ends: at end-of-sequence ids, or the request's stop ids or strings."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from tinsmith.chat.text import TextStream
from tinsmith.wire.sample import StopRule


def stop_rule(rule: StopRule, eos: Iterable[int], tokenizer: Any) -> "StopIds | StopStrings":
    """Return the rule that ends the sequences of a request; `eos` are the model's end-of-sequence tokens."""
    ids = (*rule.token_ids, *(eos if rule.eos else ()))
    return StopStrings(ids, rule.strings, tokenizer) if rule.strings else StopIds(ids)


class StopIds:
    """Stops at one of a set of token ids. It has no state, so all sequences of a request share it."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        return token in self.ids

    def for_another(self) -> Self:
        """The rule for another sequence of the request."""
        return self


class StopStrings:
    """Stops at a token id, or as soon as the text contains a string. Fed every token of one sequence, in order."""

    def __init__(self, ids: Iterable[int], strings: tuple[str, ...], tokenizer: Any) -> None:
        self.ids = frozenset(ids)
        self.strings = StringMatcher(strings)
        self.tokenizer = tokenizer
        self.text = TextStream(tokenizer.backend_tokenizer)
        self.matched = 0

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        if token in self.ids:
            return True
        self.matched, found = self.strings.read(self.matched, self.text.add(token))
        return found

    def for_another(self) -> "StopStrings":
        """Return the rule for another sequence of the request, which shares what is large."""
        another = StopStrings((), (), self.tokenizer)
        another.ids, another.strings = self.ids, self.strings
        return another


class StringMatcher:
    """Finds any of some strings in text that comes in pieces, with the automaton of Aho and Corasick (1975).

    Its states are the beginnings of the strings; 0 is the empty one.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        """The automaton is built when text is first read: requests that wait hold their strings alone."""
        self.strings = strings
        self.longer: list[dict[str, int]] = []
        """For each state, those that are one character longer."""
        self.complete: list[bool] = []
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
        """Return the state after more text, and whether a string is complete in it. A text begins in state 0."""
        if not self.longer:
            self._build()
        for character in text:
            state = self._step(state, character)
            if self.complete[state]:
                return state, True
        return state, False
