"""Requests of Anthropic's API: no parameter that is accepted is ignored."""

import json
from typing import Any

from tinsmith.wire.message_requests import parse_messages


def test_disabled_thinking_reaches_the_chat_template() -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    assert parse_messages(json.dumps(asked).encode()).template_options == {}
    asked["thinking"] = {"type": "disabled"}
    assert parse_messages(json.dumps(asked).encode()).template_options == {"enable_thinking": False}
