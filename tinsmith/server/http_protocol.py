"""HTTP/1.1 on one connection: uvicorn's httptools protocol with a limit on what arrives outside of bodies.

httptools joins the pieces of a header that is not complete, so a header of 100 MB would stop every request for 20 seconds while
it grows, and uvicorn has no limit for it (`h11_max_incomplete_event_size` is for h11 alone).
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.server.replies import json_reply

_PIECE_BYTES = 16 * 1024
"""Bytes handed to the parser between two looks at the limit."""

_LINGER_S = 2.0
"""How long a refused connection is still read from: closed at once, it would be reset before the client has read the reason."""


class BoundedHttp(HttpToolsProtocol):
    """See the module. A chunked body's trailers and chunk extensions are counted as headers are."""

    max_header_kib = 64
    """Of request line and headers together, in KiB."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **options)
        self.outside_body = 0
        """Bytes since the last part of a body, or the last whole header."""
        self.in_body = False
        self.refused = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser, headers piece by piece, and stop at the limit."""
        size = len(data) if self.in_body else _PIECE_BYTES
        for start in range(0, len(data), size):
            if self.refused or self.transport.is_closing():
                return
            piece = data[start : start + size]
            self.outside_body += len(piece)
            super().data_received(piece)
            if self.outside_body > self.max_header_kib * 1024:
                self._refuse()

    def on_headers_complete(self) -> None:
        """The header is whole: count anew."""
        super().on_headers_complete()
        self.outside_body = 0
        self.in_body = True

    def on_body(self, body: bytes) -> None:
        """What comes now is bounded by the limit of bodies."""
        super().on_body(body)
        self.outside_body = 0

    def on_message_complete(self) -> None:
        """The next request begins."""
        super().on_message_complete()
        self.outside_body = 0
        self.in_body = False

    def _refuse(self) -> None:
        self.refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # in a body's trailer: its reply may be on its way
            self.transport.close()
            return
        reply = json_reply(
            {"detail": f"the request's header is longer than {self.max_header_kib} KiB (max_header_kib); send a shorter one"}, 431
        )
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
        self.transport.write(head + fields + b"\r\n" + bytes(reply.body))
        self.loop.call_later(_LINGER_S, self.transport.close)


def http_protocol(max_header_kib: int) -> type[BoundedHttp]:
    """The protocol class for uvicorn with a limit of `max_header_kib` KiB."""
    return type("LimitedHttp", (BoundedHttp,), {"max_header_kib": max_header_kib})
