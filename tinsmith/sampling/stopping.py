"""When a generated sequence ends: end-of-sequence ids, the request's stop ids, or its stop strings."""

from collections.abc import Iterable
from typing import Any

from tokenizers.decoders import DecodeStream

_INVALID_PREFIX = "Invalid prefix encountered"
"""How the message of `DecodeStream` begins when tokens that follow change text that it has already given out."""


class StopIds:
    """Stops at one of a set of token ids."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        return token in self.ids


class StopStrings:
    """Stops at a token id, or as soon as the generated text contains one of the strings. Fed every token of one sequence, in order."""

    def __init__(self, ids: Iterable[int], strings: tuple[str, ...], tokenizer: Any) -> None:
        self.ids = frozenset(ids)
        self.strings = strings
        self.text = TextStream(tokenizer)
        self.tail = ""
        self.keep = max(len(string) for string in strings) - 1

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        if token in self.ids:
            return True
        text = self.tail + self.text.add(token)
        if any(string in text for string in self.strings):
            return True
        self.tail = text[-self.keep :] if self.keep else ""
        return False


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
