"""When a generated sequence ends: end-of-sequence ids, the request's stop ids, or its stop strings."""

from collections.abc import Iterable
from typing import Any

from tokenizers.decoders import DecodeStream


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
        self.backend = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=False)
        self.tail = ""
        self.keep = max(len(string) for string in strings) - 1

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token, which belongs to the answer."""
        if token in self.ids:
            return True
        text = self.tail + (self.stream.step(self.backend, token) or "")
        if any(string in text for string in self.strings):
            return True
        self.tail = text[-self.keep :] if self.keep else ""
        return False
