"""Counts the contents of a forward_backward request in its bytes, before anything is built from them.

An empty datum takes two bytes on the wire and a thousand times as much in memory; kilobytes of zstd can hold millions.
So datums, chunks, images, tokens and tensors are counted up to the first limit. The same pass finds the request's key.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.config import RequestsConfig
from tinsmith.errors import UserError, translated
from tinsmith.wire.json_body import MAX_ID

_MAX_TENSORS = 32
"""Most loss_fn_inputs of one datum; the API knows eight."""
_MAX_FIELDS = 2**19
"""Most protobuf fields. It also limits provenance spans, of which the cookbook sends four a turn."""

_MODEL_ID, _SEQ_ID, _DATA = 1, 2, 3
"""Field numbers of ForwardBackwardRequest."""
_CHUNK, _TENSOR = 1, 2
"""Field numbers of Datum."""
_TEXT, _IMAGE = 1, 2
"""Field numbers of Chunk."""
_TOKEN_BYTES, _TEXT_BYTES = 4, 6
"""Bytes of a token id, and most before the ids of a text (tag and length)."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass
class RequestKey:
    """The operation of a request, as far as it was read."""

    model_id: str = ""
    seq_id: int = 0


class LimitError(UserError):
    """The request exceeds a setting. The SDK sends its `key` before the data."""

    def __init__(self, message: str, key: RequestKey) -> None:
        super().__init__(message)
        self.key = key


class Inspection:
    """One pass over the bytes of a request."""

    def __init__(self, body: bytes, limits: RequestsConfig, longest: int | None = None) -> None:
        """Raises LimitError at the first limit, UserError for what is no protobuf.

        A datum of more than `longest` tokens fits into no model of this server.
        """
        self.body = body
        self.limits = limits
        self.longest = longest
        self.key = RequestKey()
        self.counts: Counter[str] = Counter()
        for number, kind, start, end in self._fields(0, len(body)):
            if number == _DATA and kind == _BYTES:
                self._inspect_datum(start, end)
            elif number == _MODEL_ID and kind == _BYTES:
                if end - start > MAX_ID:
                    raise UserError(f"model_id has {end - start} bytes; no id of this server has more than {MAX_ID}")
                self.key.model_id = self._text(start, end)
            elif number == _SEQ_ID and kind == _VARINT:
                self.key.seq_id = start

    def _inspect_datum(self, start: int, end: int) -> None:
        self._count("datums", self.limits.max_datums, "max_datums")
        tensors = tokens = 0
        for number, _, first, last in self._fields(start, end):
            if number == _CHUNK:
                tokens += self._inspect_chunk(first, last)
                if self.longest is not None and tokens > self.longest:
                    raise LimitError(
                        f"{self._place()}: the model input holds more than {self.longest} tokens, "
                        "the longest context window of this server's base models",
                        self.key,
                    )
            elif number == _TENSOR:
                tensors += 1
                if tensors > _MAX_TENSORS:
                    raise LimitError(f"{self._place()}: loss_fn_inputs has more than {_MAX_TENSORS} entries", self.key)

    def _inspect_chunk(self, start: int, end: int) -> int:
        """The least number of tokens that its text has."""
        self._count("chunks", self.limits.max_chunks, "max_chunks")
        tokens = 0
        for number, _, first, last in self._fields(start, end):
            if number == _IMAGE:
                self._count("images", self.limits.max_images, "max_images")
            elif number == _TEXT:
                tokens += max(0, last - first - _TEXT_BYTES) // _TOKEN_BYTES
                self.counts["tokens"] += (last - first) // _TOKEN_BYTES  # at most
        return tokens

    def _count(self, things: str, limit: int, setting: str) -> None:
        self.counts[things] += 1
        if self.counts[things] > limit:
            raise LimitError(
                f"{self._place()}: the request holds more than {limit} {things} ({setting}); send smaller ones",
                self.key,
            )

    def _place(self) -> str:
        return f"datum {self.counts['datums'] - 1}"

    def _fields(self, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Field number, wire type, beginning and end of each field of a message; for a varint its value and end."""
        while position < end:
            self.counts["fields"] += 1
            if self.counts["fields"] > _MAX_FIELDS:
                raise LimitError(
                    f"{self._place()}: the request holds more than {_MAX_FIELDS} protobuf fields; send smaller ones",
                    self.key,
                )
            tag, position = self._varint(position, end)
            kind = tag & 7
            if kind == _VARINT:
                value, position = self._varint(position, end)
            elif kind in (_BYTES, _FIXED32, _FIXED64):
                size = 4 if kind == _FIXED32 else 8
                if kind == _BYTES:
                    size, position = self._varint(position, end)
                value, position = position, position + size
            else:
                raise UserError(_broken(position))
            if position > end:
                raise UserError(_broken(position))
            yield tag >> 3, kind, value, position

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """A number of up to 64 bits, and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                break
            byte = self.body[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise UserError(_broken(position))

    def _text(self, start: int, end: int) -> str:
        with translated(UnicodeDecodeError, UserError, lambda _: _broken(start)):
            return self.body[start:end].decode()


def _broken(position: int) -> str:
    return f"the body is not a protobuf ForwardBackwardRequest: it cannot be read at byte {position}"
