"""A local HTTP server with OpenAI's chat completions API, whose answers come from another thread.

It turns any program that asks a model through this API into an environment: each request waits until the trainer's
policy has answered it. A header of the requests says which conversation they belong to.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from tinsmith_rl.env import ChatMessage
from tinsmith_rl.errors import UserError


class ExternalChat:
    """A conversation that an external program leads: its requests are questions, which are answered one at a time."""

    def __init__(self) -> None:
        self.questions: Queue[list[ChatMessage] | None] = Queue()
        """Messages of each request; None marks the end of the conversation."""
        self.refusal = ""
        """The reason why a request was refused; empty if none was."""
        self._answers: Queue[str | None] = Queue()

    def answer(self, text: str) -> None:
        """Answer the last question."""
        self._answers.put(text)

    def hang_up(self) -> None:
        """Refuse the waiting question and all later ones."""
        self._answers.put(None)

    def ask(self, body: dict[str, Any]) -> str | None:
        """Put the question of a request and wait for its answer; None after `hang_up`.

        Raises UserError for tools and streaming.
        """
        if tools := body.get("tools"):
            names = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
            raise UserError(f"the program offers tools ({names}), and answers here are text")
        if body.get("stream"):
            raise UserError("the program asks for a stream, and answers here are sent whole; set stream to false")
        self.questions.put(body["messages"])
        text = self._answers.get()
        if text is None:
            self._answers.put(None)
        return text


class ChatEndpoint:
    """The HTTP server, which runs in threads until `close`.

    The header `header` says which conversation a request belongs to.
    """

    def __init__(self, header: str) -> None:
        self.header = header
        self._chats: dict[str, ExternalChat] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The base_url for clients."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def expect(self, name: str, chat: ExternalChat) -> None:
        """Let requests whose header is `name` be questions of `chat`."""
        self._chats[name] = chat

    def forget(self, names: list[str]) -> None:
        """Answer 404 to requests with these names."""
        for name in names:
            del self._chats[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, name: str | None, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the reply to a request. Waits for the answer."""
        chat = self._chats.get(name or "")
        if chat is None or not path.endswith("/chat/completions"):
            return 404, _error(f"there is no conversation {self.header}={name!r} at {path}")
        try:
            text = chat.ask(body)
        except UserError as error:
            chat.refusal = str(error)
            return 400, _error(str(error))
        return (
            (200, _completion(str(body.get("model")), text))
            if text is not None
            else (410, _error("the conversation has ended"))
        )


def _handler_of(endpoint: ChatEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = endpoint.reply(self.headers.get(endpoint.header), self.path, body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler


def _completion(model: str, text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": "answer",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
