"""Where bad requests are sent, and what a row of their table is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.acceptance.conftest import API_KEY
from tests.acceptance.raw import GOOD, RawModel
from tests.running import Server

__all__ = ["GOOD"]


class Target:
    """A model, and a sampling session on its base model, that bad requests are sent to."""

    def __init__(self, server: Server, base_model: str) -> None:
        self.http = server.client()
        self.http.headers["X-API-Key"] = API_KEY
        self.model = RawModel(self.http, base_model)
        self.session_id = self.model.model_id.partition(":train:")[0]
        asked = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": base_model}
        self.sampler: str = self.http.post("create_sampling_session", json=asked).json()["sampling_session_id"]
        self.seq_id = self.samples = 0

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def next_sample(self) -> int:
        self.samples += 1
        return self.samples

    def scores(self) -> list[list[float]]:
        return self.model.scores(self.next())

    def fill(self, text: str) -> str:
        """`text` with the ids of this target in the place of their names in braces."""
        return (
            text.replace("{session}", self.session_id)
            .replace("{model}", self.model.model_id)
            .replace("{sampler}", self.sampler)
        )

    def failure(self, request_id: str) -> str:
        """What a failed operation or sample says; it must be the client's fault."""
        result = self.model.result(request_id)
        assert result.get("category") == "user", result
        return str(result["error"])


@dataclass(frozen=True)
class Case:
    name: str
    send: Callable[[Target], str]
    """Sends it and returns the words of its refusal."""
    says: str
    """What they must contain, in parts that ` ... ` divides."""
    base_model: str = "text"


def refused(
    path: str,
    status: int,
    content: bytes | str | Callable[[], bytes],
    media_type: str = "application/json",
    method: str = "POST",
    **headers: str,
) -> Callable[[Target], str]:
    """A request that is refused at once with this status.

    A text may hold {session}, {model} and {sampler}, the path too.

    Content that is large is made by a function when it is sent.
    """

    def send(target: Target) -> str:
        body = (
            target.fill(content) if isinstance(content, str) else content if isinstance(content, bytes) else content()
        )
        sent = {"Content-Type": media_type} | {name.replace("_", "-"): value for name, value in headers.items()}
        reply = target.http.request(method, target.fill(path), content=body, headers=sent)
        assert reply.status_code == status, reply.text
        return detail_of(reply)

    return send


def detail_of(reply: httpx.Response) -> str:
    """What a refusal says."""
    detail: Any = reply.json()["detail"]
    assert isinstance(detail, str)
    return detail
