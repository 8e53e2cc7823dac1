"""Text of tokens that come one by one: never half a character, and nothing from a stop string on."""

from collections.abc import Container, Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_INVALID_PREFIX = "Invalid prefix encountered"
"""Prefix of `DecodeStream`'s error when later tokens change text that it has given out."""
_MOST_UNREAD = 32
"""Tokens that wait for the rest of a character. `DecodeStream` decodes all of them again at each token."""


class TextStream:
    """The text of a sequence of tokens, as far as it is certain.

    With byte fallback (Gemma, Llama 2, Phi-3) a byte that is a letter by itself becomes a replacement character when a
    following byte makes the run invalid UTF-8. `DecodeStream` has given out the letter by then and raises at every
    later token. The text given out stays, and a new stream begins with the tokens whose text is not given out yet.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.unread: list[int] = []
        """Tokens whose text is not given out yet."""

    def add(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        self.unread.append(token)
        try:
            text = self.stream.step(self.tokenizer, token)
        except Exception as error:  # the library raises this very class
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            text = self._begin_anew()
        if text:
            self.unread.clear()
        elif len(self.unread) > _MOST_UNREAD:
            return self._pass_on_invalid()
        return text or ""

    def rest(self) -> str:
        """Return the text of the tokens that were still uncertain when the sequence ended."""
        return self._decoded(self.unread)

    def _begin_anew(self) -> str:
        self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)
        return "".join(self.stream.step(self.tokenizer, token) or "" for token in self.unread)

    def _pass_on_invalid(self) -> str:
        """Return the text of so many tokens that they are no character, but for the last, which may begin one."""
        for end in range(len(self.unread) - 1, len(self.unread) - 5, -1):
            before, last = self._decoded(self.unread[:end]), self.unread[end:]
            if before + self._decoded(last) == self.rest():
                self.unread = last
                return before + self._begin_anew()
        return ""

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)


class AnswerText:
    """The text of an answer without special tokens and `silent` ones, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), silent: Container[int] = ()) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=True)
        self._silent = silent
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def add(self, tokens: Iterable[int]) -> str:
        """Return the text that is certain now and was not before."""
        return "".join(self._pass_on(self._stream.add(token)) for token in tokens if token not in self._silent)

    def end(self) -> str:
        """Return what was held back, when no more tokens come."""
        text = self._pass_on(self._stream.rest())
        return text if self.stopped_by is not None else text + self._held

    def _pass_on(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        cut, self.stopped_by = min(found) if found else (len(text) - held_back(text, self._stops), None)
        self._held = text[cut:]
        return text[:cut]


def held_back(text: str, wanted: Iterable[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of these."""
    longest = 0
    for each in wanted:
        for length in range(min(len(each) - 1, len(text)), longest, -1):
            if text.endswith(each[:length]):
                longest = length
                break
    return longest
