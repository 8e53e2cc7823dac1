"""Forward work of an engine whose workers are the test."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tinsmith.engine.forward_work import ForwardWork, PassOrder
from tinsmith.engine.passes import Paces
from tinsmith.engine.shares import divide
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import PassDone, Prepare, Prepared, RunPass
from tinsmith.store.records import Command


class Device:
    """In the place of the workers, for each of which a sequence of n tokens takes n + n² / 100 milliseconds."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.failed: list[tuple[str, Exception]] = []
        """Operations that were given up, by their request ids."""
        self.is_shared = True
        self.forward = ForwardWork(
            PassOrder(Paces(tokens_per_pass=1000, workers=1, is_shared=lambda: self.is_shared), max_pixels=1000),
            next_number=itertools.count(1).__next__,
            send=self.sent.append,
            fail=lambda command, error, _: self.failed.append((command.request_id, error)),
            put_back=self.never,
            put_off=self.never,
            passed=lambda call, pieces, sent_at: self.passed.append(call.number),
        )
        self.passed: list[int] = []
        """Numbers of the passes that have ended."""

    def never(self, *_: Any) -> None:
        pytest.fail("nothing is wrong here")

    def train(
        self, model: str, lengths: list[int], pixels: list[dict[str, int]] | None = None, base: str = "tiny"
    ) -> None:
        """Ask for a forward_backward, which is prepared at once."""
        self.forward.take(self.prepared(model, lengths, pixels, base))

    def prepared(
        self, model: str, lengths: list[int], pixels: list[dict[str, int]] | None = None, base: str = "tiny"
    ) -> Prepared:
        """Ask for a forward_backward; what the worker answers when it has prepared it.

        `pixels` are those of images, if it has any.
        """
        seq_id = self.forward.next_number()
        self.forward.add(Command(seq_id, model, seq_id, "forward_backward", 0, 0.0), base, b"")
        asked = self.sent.pop()
        assert isinstance(asked, Prepare)
        return Prepared(asked.number, asked.operation, True, lengths, pixels or [{} for _ in lengths])

    def given(self) -> list[RunPass]:
        """Passes that it is given to have at a time."""
        self.forward.send_passes(set())
        passes = [message for message in self.sent if isinstance(message, RunPass)]
        self.sent.clear()
        return passes

    def compute(self, asked: RunPass, most: int = 1000) -> float:
        """Say that a pass is done; returns the seconds that it took."""
        shares = divide(asked, self.forward.order.paces.workers, 1000)
        lengths = [share.lengths for share in shares if share is not None]
        took = [
            (asked.base_model, True, each, sum(length + length**2 / 100 for length in each) / 1000) for each in lengths
        ]
        results = [(*piece, [0]) for piece in asked.pieces]
        zeros = np.zeros(len(results)).tobytes()
        self.forward.take(PassDone(asked.number, results, [], most, [[] for _ in results], took, zeros))
        return max(seconds for *_, seconds in took)

    def computed(self, most: int = 1000) -> Iterator[tuple[RunPass, float]]:
        """Compute the passes that it is given, one at a time, until there are none; each with its seconds."""
        while given := self.given():
            for asked in given:
                yield asked, self.compute(asked, most)
