"""Servers that are none of ours: they give the answers that a test names."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NOBODY = "http://127.0.0.1:9"
"""Where no program listens: the port is set apart for one that none has any more."""
Reply = tuple[int, Any]
"""HTTP status and JSON; of a redirection the place."""


@contextmanager
def answering(replies: Mapping[str, Reply] | Callable[[], Reply], certificate: Path | None = None) -> Iterator[str]:
    """The URL of a server with these answers by path, or one after the other. With a certificate it speaks TLS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = replies() if callable(replies) else replies.get(self.path, (404, {}))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", content)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def saying(reply: bytes) -> Iterator[str]:
    """The URL of something that says this to each connection, or with no bytes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        if reply:
            threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
