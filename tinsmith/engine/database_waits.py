"""Models that wait for the database: their next command is tried again when it can be read, at growing intervals."""

import logging

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.model_state import ModelStates
from tinsmith.engine.recorder import Backoff
from tinsmith.errors import StoreUnavailableError
from tinsmith.store.records import Command

log = logging.getLogger(__name__)


class DatabaseWaits:
    """Puts models off until the next attempt, which is one for all."""

    def __init__(self, models: ModelStates, queue: CommandQueue) -> None:
        self.models = models
        self.queue = queue
        self.backoff = Backoff()

    def put_off(self, model_id: str, error: StoreUnavailableError) -> None:
        log.warning("model %s waits for the database: %s", model_id, error)
        self.models[model_id].is_put_off = True
        self.try_later()

    def put_back(self, commands: list[Command], error: StoreUnavailableError) -> None:
        """Put commands of one model, which follow each other, back into the queue."""
        for command in reversed(commands):
            self.queue.models[command.model_id].put_back(command)
        self.put_off(commands[0].model_id, error)

    def try_later(self) -> None:
        if self.backoff.wait_s == 0:  # several models that are tried together are one attempt
            self.backoff.failed()
