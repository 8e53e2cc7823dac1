"""Decides when a sequence ends: at end-of-sequence ids, or the request's stop ids or strings."""

from collections.abc import Iterable
from copy import copy
from typing import Any, Self

from tokenizers.decoders import DecodeStream

from tinsmith.wire.sample import StopRule

_INVALID_PREFIX = "Invalid prefix encountered"
"""Prefix of `DecodeStream`'s error when later tokens change text that it has given out."""


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
        self.strings = strings
        self.longest = max(map(len, strings))
        self.tokenizer = tokenizer
        self.text = TextStream(tokenizer)
        self.tail = ""
        """The last characters so far, as many as a string may have."""

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        if token in self.ids:
            return True
        new = self.text.add(token)
        text = self.tail + new
        self.tail = text[-self.longest :]
        return any(text.endswith(self.strings, 0, len(text) - behind) for behind in range(len(new)))

    def for_another(self) -> "StopStrings":
        """Return the rule for another sequence of the request, which shares what is large."""
        another = copy(self)
        another.text, another.tail = TextStream(self.tokenizer), ""
        return another


class TextStream:
    """The text of a sequence of tokens, as far as it is certain.

    With byte fallback (Gemma, Llama 2, Phi-3) a byte that is a letter by itself becomes a replacement character when a following byte makes
    the run invalid UTF-8. `DecodeStream` has given out the letter by then and raises at every later token. The text given out stays, and a
    new stream begins with the tokens whose text is not given out yet.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=False)
        self.unread: list[int] = []
        """Tokens whose text is not given out yet."""

    def add(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
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
        self.stream = DecodeStream(skip_special_tokens=False)
        return "".join(self.stream.step(self.backend, token) or "" for token in self.unread)
