"""An address that speaks OpenAI's chat completions, and whose model is whoever answers: programs that ask a model become environments.

A conversation is known by a header of its requests. Each request is a question that waits until somebody answers it from another thread.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from tinsmith.errors import UserError
from tinsmith.rl.env import Message


class Conversation:
    """One program's questions, answered in turn. `None` among them is its end."""

    def __init__(self) -> None:
        self.questions: Queue[list[Message] | None] = Queue()
        self.refusal = ""
        """Why a question was refused."""
        self._answers: Queue[str | None] = Queue()

    def answer(self, text: str) -> None:
        """What the model says to the last question."""
        self._answers.put(text)

    def hang_up(self) -> None:
        """Refuse the question that waits, and all that come."""
        self._answers.put(None)

    def ask(self, body: dict[str, Any]) -> str | None:
        """The answer to a request; None once nobody answers any more. Raises UserError for what no text can answer."""
        if tools := body.get("tools"):
            names = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
            raise UserError(f"the program offers tools ({names}), and answers here are text")
        if body.get("stream"):
            raise UserError("the program asks for a stream, and answers here come whole; set stream to false")
        self.questions.put(body["messages"])
        text = self._answers.get()
        if text is None:
            self._answers.put(None)
        return text


class ChatEndpoint:
    """The address, served from threads until `close`. Conversations are told apart by the header `header`."""

    def __init__(self, header: str) -> None:
        self.header = header
        self._conversations: dict[str, Conversation] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """What a client calls base_url."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def expect(self, name: str, conversation: Conversation) -> None:
        """Requests whose header is `name` are questions of `conversation`."""
        self._conversations[name] = conversation

    def forget(self, names: list[str]) -> None:
        """Nobody answers for these any more."""
        for name in names:
            del self._conversations[name]

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def reply(self, name: str | None, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body for a request."""
        conversation = self._conversations.get(name or "")
        if conversation is None or not path.endswith("/chat/completions"):
            return 404, _error(f"nobody answers at {path} for {self.header}={name!r}")
        try:
            text = conversation.ask(body)
        except UserError as error:
            conversation.refusal = str(error)
            return 400, _error(str(error))
        return (200, _completion(str(body.get("model")), text)) if text is not None else (410, _error("nobody answers any more"))


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
            """Say nothing about requests."""

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
