"""HTTP/1.1 on one connection: uvicorn's httptools protocol with a limit on headers.

While a header is incomplete, httptools joins its pieces again and again: a header of 100 MB would stop the event loop for 20 seconds.
uvicorn has no limit for this; its `h11_max_incomplete_event_size` is for h11 only.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.server.replies import json_reply

_PIECE_BYTES = 16 * 1024
"""Bytes that are parsed before the limit is checked again."""

_LINGER_S = 2.0
"""How long a refused connection stays open, in seconds. If it were closed at once, the client could not read the reason."""


class BoundedHttp(HttpToolsProtocol):
    """The protocol with the limit, which also covers the trailers and chunk extensions of a chunked body."""

    max_header_kib = 64
    """Limit of request line and headers together, in KiB."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments that uvicorn passes."""
        super().__init__(*args, **options)
        self.outside_body = 0
        """Bytes since the last part of a body or the end of the last header."""
        self.in_body = False
        self.refused = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser; headers in pieces, up to the limit."""
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
        """The header is complete, so counting starts again."""
        super().on_headers_complete()
        self.outside_body = 0
        self.in_body = True

    def on_body(self, body: bytes) -> None:
        """Bodies have a limit of their own."""
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
