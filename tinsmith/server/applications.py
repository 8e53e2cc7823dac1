"""Keeps what the answers to applications share: chat formats of base models, ids, and the number of open streams."""

import asyncio
import itertools
import uuid

from tinsmith.chat.template import ChatFormat
from tinsmith.protocol.facts import ModelFacts
from tinsmith.store import ids


class Applications:
    """Chat formats of the base models, ids for answers, and the number of those that are streamed."""

    def __init__(self) -> None:
        self._formats: dict[str, asyncio.Task[ChatFormat]] = {}
        """Keyed by the place of the model's files."""
        self._sessions: dict[str, str] = {}
        """The session of each tenant under which its answers are limited and metered. Clients do not see it."""
        self._numbers = itertools.count(1)
        self.streams = 0
        """Begun streams that wait for more tokens: one whose client does not read slows no other."""

    def new_answer(self, tenant: str) -> tuple[str, int]:
        """The id of what a new answer belongs to, and its number there."""
        session_id = self._sessions.setdefault(tenant, str(uuid.uuid4()))
        return ids.answers_id(session_id), next(self._numbers)

    async def format_of(self, facts: ModelFacts) -> ChatFormat:
        """The tokenizer and chat template of a base model, read once. Raises UserError if its files cannot be used."""
        source = facts.tokenizer_id
        if source not in self._formats or (self._formats[source].done() and self._formats[source].exception()):
            self._formats[source] = asyncio.create_task(asyncio.to_thread(ChatFormat, source))
        return await asyncio.shield(self._formats[source])
