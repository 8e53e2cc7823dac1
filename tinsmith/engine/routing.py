"""Chooses the worker of a sample: the one that has computed most of its prompt, unless others have much less to do."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson

from tinsmith.protocol.serving import Sample

BLOCK = 64
"""Tokens of a remembered piece of a prompt."""
REMEMBERED = 2**16
"""Most pieces that are remembered of each worker."""
IMAGE_TOKENS = 256
"""Tokens that an image counts for; only the worker knows its real number."""
LARGEST = 2**20
"""Most bytes of a request that is read: the engine does nothing else meanwhile."""
DECODE = 8
"""Cost of a sampled token, in tokens of a prompt."""


@dataclass
class _Worker:
    """Prompts and samples of one worker."""

    load: float = 0.0
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Hashes of beginnings of prompts, the least recently used first."""

    def matched(self, beginnings: list[int]) -> int:
        """Return how many of a prompt's beginnings, shortest first, it has computed before."""
        count = 0
        while count < len(beginnings) and beginnings[count] in self.known:
            count += 1
        return count

    def remember(self, beginnings: list[int]) -> None:
        for beginning in beginnings:
            self.known[beginning] = None
            self.known.move_to_end(beginning)
        while len(self.known) > REMEMBERED:
            self.known.popitem(last=False)


@dataclass
class _Running:
    """A sample that a worker has."""

    message: Sample
    rank: int
    cost: float
    asked: set[int]


class Routing:
    """Chooses a worker for each sample, and knows which has which."""

    def __init__(self, count: int) -> None:
        self.workers = [_Worker() for _ in range(count)]
        self.running: dict[tuple[str, int], _Running] = {}
        """Running samples by request id and run; empty with one worker."""

    def choose(self, message: Sample) -> int:
        """Return the worker for a sample, which is its until `ended`."""
        if len(self.workers) == 1:
            return 0
        beginnings: list[int] = []
        tokens = answer = len(message.payload) // 8
        if len(message.payload) <= LARGEST:
            with suppress(orjson.JSONDecodeError):  # of numbers that the server's parser takes and this one does not
                body = orjson.loads(message.payload)
                beginnings, tokens = _beginnings(body, message.weights_id)
                answer = body["sampling_params"].get("max_tokens") or tokens
        answers = DECODE * message.num_samples * answer
        costs = [max(0, tokens - BLOCK * worker.matched(beginnings)) + answers for worker in self.workers]
        rank = min(range(len(self.workers)), key=lambda rank: self.workers[rank].load + costs[rank])
        self.workers[rank].remember(beginnings)
        self.workers[rank].load += costs[rank]
        self.running[message.request_id, message.run] = _Running(message, rank, costs[rank], {rank})
        return rank

    def elsewhere(self, request_id: str, run: int) -> tuple[int, Sample] | None:
        """Move a sample to another worker, as its own has dropped the unused weights; None if all have been asked."""
        running = self.running.get((request_id, run))
        left = [] if running is None else [rank for rank in range(len(self.workers)) if rank not in running.asked]
        if running is None or not left:
            return None
        self.workers[running.rank].load -= running.cost
        running.rank = min(left, key=lambda rank: self.workers[rank].load)
        self.workers[running.rank].load += running.cost
        running.asked.add(running.rank)
        return running.rank, running.message

    def of(self, request_id: str, run: int) -> int | None:
        if len(self.workers) == 1:
            return 0
        found = self.running.get((request_id, run))
        return None if found is None else found.rank

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Give up the samples whose request ids are `gone`."""
        for request_id, run in [key for key in self.running if gone(key[0])]:
            self.ended(request_id, run)

    def ended(self, request_id: str, run: int) -> None:
        """Forget a sample that is done, failed or given up."""
        running = self.running.pop((request_id, run), None)
        if running is not None:
            self.workers[running.rank].load -= running.cost


def _beginnings(body: dict[str, Any], weights_id: str | None) -> tuple[list[int], int]:
    """Hash the prompt's beginnings, each a piece longer than the last; returns them, and its rough token count."""
    pieces: list[Any] = []
    tokens = 0
    for chunk in body["prompt"]["chunks"]:
        ids = chunk.get("tokens")
        if ids is None:
            pieces.append(chunk.get("data") or chunk.get("location"))
            tokens += IMAGE_TOKENS
        else:
            pieces += [tuple(ids[start : start + BLOCK]) for start in range(0, len(ids), BLOCK)]
            tokens += len(ids)
    hashes = accumulate(pieces, lambda before, piece: hash((before, piece)), initial=hash(weights_id))
    return list(hashes)[1:], tokens
