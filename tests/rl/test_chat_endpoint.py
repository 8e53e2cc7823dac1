"""Programs that ask a model over OpenAI's API are answered by whoever plays the model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tinsmith_rl.adapters.chat_endpoint import ChatEndpoint, ExternalChat

QUESTION = [{"role": "user", "content": "hot or cold?"}]


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    made = ChatEndpoint("X-Game")
    yield made
    made.close()


def ask(endpoint: ChatEndpoint, game: str, **body: Any) -> httpx.Response:
    whole = {"model": "policy", "messages": QUESTION, **body}
    return httpx.post(f"{endpoint.url}/chat/completions", headers={"x-game": game}, json=whole, timeout=600)


def test_conversations_are_answered_apart(endpoint: ChatEndpoint) -> None:
    games = {name: ExternalChat() for name in ("first", "second")}
    for name, game in games.items():
        endpoint.expect(name, game)
    with ThreadPoolExecutor(2) as threads:
        replies = {name: threads.submit(ask, endpoint, name) for name in games}
        assert all(game.questions.get(timeout=600) == QUESTION for game in games.values())
        games["second"].answer("cold")
        games["first"].answer("hot")
        (first,), (second,) = (reply.result().json()["choices"] for reply in replies.values())
    assert (first["message"], first["finish_reason"]) == ({"role": "assistant", "content": "hot"}, "stop")
    assert second["message"]["content"] == "cold"


def test_nobody_answers_what_no_text_can_answer_a_stranger_or_after_the_end(endpoint: ChatEndpoint) -> None:
    game = ExternalChat()
    endpoint.expect("game", game)
    refused = ask(endpoint, "game", tools=[{"type": "function", "function": {"name": "look"}}])
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, game.refusal)
    assert game.refusal == "the program offers tools (look), and answers here are text"
    assert ask(endpoint, "game", stream=True).status_code == 400
    assert game.questions.empty()
    assert ask(endpoint, "stranger").status_code == 404
    game.hang_up()
    assert [ask(endpoint, "game").status_code for _ in range(2)] == [410, 410]
    endpoint.forget(["game"])
    assert ask(endpoint, "game").status_code == 404
