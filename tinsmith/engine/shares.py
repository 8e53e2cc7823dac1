"""Shares work among a group of workers, and joins their answers into one when all that were asked have answered.

Every worker has every base model, every model and its optimizer. A pass is divided by what its datums cost, so that
each worker accumulates gradients of its share. A step adds these up over all workers
(`training/parallel/all_reduce.py`), and each takes it for itself, with the same numbers to the last bit. A sample runs
on one worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from tinsmith.config import Config
from tinsmith.engine.routing import Routing
from tinsmith.engine.worker_process import WorkerProcess
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import writer_of
from tinsmith.protocol.serving import CancelSample, EndSession, ForgetCheckpoint, Sample, SampleDone, SampleFailed
from tinsmith.protocol.work import (
    Answer,
    Call,
    CallFailed,
    Copied,
    CopyEnded,
    CreateModel,
    DeleteModel,
    Drop,
    ExportModel,
    FinishSave,
    LoadModel,
    OptimStep,
    PartWritten,
    PassDone,
    Prepare,
    Prepared,
    PrepareFailed,
    RunPass,
    SaveModel,
    TakeSnapshot,
)
from tinsmith.store import ids

QUADRATIC_TOKENS = 2**15
"""Sequence length at which attention costs as much as all that grows linearly, for 1 to 8 billion parameters."""

PIXELS_OF_A_TOKEN = 32 * 32
"""Pixels of an image that become one token: 4 patches of 16x16. Qwen2.5-VL's 28x28 are near enough."""

TOWER_COST = 0.2
"""Cost of the vision tower for a token's pixels, in tokens that the language model trains on.

Of Qwen3-VL: a tower of 24 layers 1,024 wide (27 of 1,152 for the 8B) takes each of a token's 4 patches through
0.3 (0.4) billion weights, and the mergers, forward alone: 2.6 (3.6) GFLOP. LoRA takes a token through the weights of
the language model, and back to its inputs: 7, 16 and 30 GFLOP for 2B, 4B and 8B. That is 0.4, 0.16 and 0.12 of it.
"""

QUADRATIC_PIXELS = 1_600_000
"""Pixels of an image (6,250 patches) at which attention in such a tower costs as much as all that grows linearly."""

Asked = Prepare | RunPass | Call | FinishSave
Reply = Prepared | PrepareFailed | PassDone | PartWritten | Answer | CallFailed
R = TypeVar("R")


@dataclass
class Awaited:
    """A question to some workers under one number, and their answers."""

    message: Asked
    ranks: Sequence[int]
    replies: dict[int, Reply] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)
    """Those that have their copy of what is to be saved."""
    copy_ended: list[CopyEnded] = field(default_factory=list)
    """What became of the kept copy of a step that others are still taking."""

    def of(self, kind: type[R]) -> dict[int, R]:
        """The replies of one kind, by worker."""
        return {rank: reply for rank in self.ranks if isinstance(reply := self.replies.get(rank), kind)}


class SharedWork:
    """Work of one group of workers, from its start to its end."""

    def __init__(self, config: Config, workers: Sequence[WorkerProcess], pass_tokens: list[int]) -> None:
        """`pass_tokens` counts the tokens of passes that were given to each worker, by rank."""
        self.config = config
        self.workers = workers
        self.pass_tokens = pass_tokens
        self.samplers = range(len(workers) if config.sampling.sampler == "local" else 1)
        """The workers that sample, and keep what is sampled. vLLM servers are the first one's."""
        self.routing = Routing(len(self.samplers))
        self.awaited: dict[int, Awaited] = {}
        self.loaded: set[str] = set()
        """Models that all workers have."""
        self._passes_of: dict[tuple[str, int], int] = {}
        """Most tokens of a pass on a base model that a worker has told, by name and rank."""

    @property
    def _everyone(self) -> range:
        return range(len(self.workers))

    @property
    def written(self) -> list[str]:
        """The directories of saves that have begun and not ended."""
        saves = [awaited.message for awaited in self.awaited.values()]
        called = [str(save.checkpoint["directory"]) for save in saves if isinstance(save, SaveModel | ExportModel)]
        return called + [save.directory for save in saves if isinstance(save, FinishSave)]

    # ---- What the engine says

    def send(self, message: Message) -> None:
        """Tell those whom it concerns."""
        match message:
            case RunPass():
                self._send_pass(message)
            case Prepare() | CreateModel() | LoadModel() | OptimStep():
                self._ask(message, self._everyone)
            case TakeSnapshot():
                self._ask(message, self._everyone if self.config.compares_with_copy else self.samplers)
            case SaveModel() | ExportModel():  # one where all have the same; of sharded weights each gives its part
                self._ask(
                    message,
                    self._everyone if self.config.shards_weights else [writer_of(message.model_id, len(self.workers))],
                )
            case Sample():
                self.workers[self.routing.choose(message)].send(message)
            case CancelSample():
                holder = self.routing.of(message.request_id, message.run)
                if holder is not None:
                    self.routing.ended(message.request_id, message.run)
                    self.workers[holder].send(message)
            case _:
                self._tell_all(message)

    def _send_pass(self, message: RunPass) -> None:
        """Give each worker its share, or its slice of a sequence of all."""
        count = len(self.workers)
        if message.together:
            for rank in self._everyone:
                self.pass_tokens[rank] += sum(message.lengths) // count
            self._ask(message, self._everyone)
            return
        divided = divide(message, count, self._tokens_per_pass(message.base_model) // count, self.config.shards_weights)
        shares = {rank: share for rank, share in enumerate(divided) if share is not None}
        self.awaited[message.number] = Awaited(message, list(shares))
        for rank, share in shares.items():
            self.pass_tokens[rank] += sum(share.lengths)
            self.workers[rank].send(share)

    def _ask(self, message: Asked, ranks: Sequence[int]) -> None:
        self.awaited[message.number] = Awaited(message, ranks)
        for rank in ranks:
            if isinstance(message, OptimStep) and rank != writer_of(message.model_id, len(self.workers)):
                self.workers[rank].send(replace(message, copy=""))
            else:
                self.workers[rank].send(message)

    def _tell_all(self, message: Message) -> None:
        match message:
            case DeleteModel():
                self.loaded.discard(message.model_id)
            case Drop():
                dropped = set(message.operations)
                for number, awaited in list(self.awaited.items()):
                    if isinstance(awaited.message, Prepare) and awaited.message.operation in dropped:
                        del self.awaited[number]
            case EndSession():
                self.routing.forget(lambda request_id: ids.session_of(request_id) == message.session_id)
        for worker in self.workers:
            worker.send(message)

    # ---- What the workers say

    def take(self, rank: int, message: Message) -> list[Message]:
        """Take in what a worker says; returns what the engine is to hear."""
        match message:
            case SampleFailed(gone=True) if (
                other := self.routing.elsewhere(message.request_id, message.run)
            ) is not None:
                self.workers[other[0]].send(other[1])
                return []
            case SampleDone() | SampleFailed():
                self.routing.ended(message.request_id, message.run)
            # The model can go on when all have copied their parts; where one fails to, it waits for the failure
            case Copied():
                awaited = self.awaited[message.number]
                awaited.copied.add(rank)
                return [message] if len(awaited.copied) == len(awaited.ranks) else []
            case CopyEnded() if (step := self._step_copied_to(message.directory)) is not None:
                step.copy_ended.append(message)
                return []
            case PassDone() | Prepared() | PrepareFailed() | PartWritten() | Answer() | CallFailed():
                return self._replied(rank, message)
        return [message]

    def _replied(self, rank: int, message: Reply) -> list[Message]:
        awaited = self.awaited.get(message.number)
        if awaited is None:  # of operations that were dropped, which nobody waits for
            return [message] if isinstance(message, Answer | CallFailed) else []
        awaited.replies[rank] = message
        if len(awaited.replies) < len(awaited.ranks):
            return []
        del self.awaited[message.number]
        match awaited.message:
            case RunPass() as asked:
                return self._pass_done(asked, awaited.of(PassDone))
            case Prepare() as asked:
                return [self._prepared(asked, awaited)]
            case FinishSave() as asked:
                if awaited.of(Answer):
                    # An earlier one of this path may have been sampled
                    self._tell_all(ForgetCheckpoint(asked.tinker_path))
                return list(awaited.replies.values())
            case SaveModel() | ExportModel() as asked if self.config.shards_weights and len(awaited.of(Answer)) < len(
                self.workers
            ):
                self._finish(asked, awaited)
                return []
            case asked:
                return [*self._called(asked, awaited), *awaited.copy_ended]

    def _step_copied_to(self, directory: str) -> Awaited | None:
        """Return the step whose result one worker has copied there, if others have not answered it."""
        for awaited in self.awaited.values():
            if isinstance(awaited.message, OptimStep) and awaited.message.copy == directory:
                return awaited
        return None

    def _pass_done(self, asked: RunPass, parts: dict[int, PassDone]) -> list[Message]:
        """Join the results of shares; of a sequence computed together each worker has all: take the first one's."""
        self._passes_of |= {(asked.base_model, rank): part.tokens_per_pass for rank, part in parts.items()}
        most = self._tokens_per_pass(asked.base_model)
        if not asked.together:
            return [join(list(parts.values()), most)]
        other = next((rank for rank, part in parts.items() if not same_outcome(part, parts[0])), None)
        if other is not None:
            self._break(
                other,
                (
                    f"the gradients of {asked.pieces[0][0]} are not those of one sequence: "
                    "not all workers have computed it"
                ),
            )
            return []  # the end of the group comes next
        return [replace(parts[0], tokens_per_pass=most)]

    def _tokens_per_pass(self, base_model: str) -> int:
        """Most tokens of a pass of all workers: each takes no more than the one with least memory left."""
        most = self.config.training.tokens_per_pass
        return len(self.workers) * min(self._passes_of.get((base_model, rank), most) for rank in self._everyone)

    def _prepared(self, asked: Prepare, awaited: Awaited) -> Message:
        """One worker may fail alone, as where the database is locked: then none keeps the operation."""
        failed, prepared = awaited.of(PrepareFailed), awaited.of(Prepared)
        if failed:
            for rank in prepared:
                self.workers[rank].send(Drop([asked.operation]))
            return next(iter(failed.values()))
        # What one has decoded another may not have.
        of_datums = zip(*(each.pixels for each in prepared.values()), strict=True)
        pixels = [
            {digest: size for of_worker in of_datum for digest, size in of_worker.items()} for of_datum in of_datums
        ]
        # Too long for one of them is enough
        together = sorted({index for each in prepared.values() for index in each.together})
        return replace(next(iter(prepared.values())), pixels=pixels, together=together)

    def _finish(self, asked: SaveModel | ExportModel, awaited: Awaited) -> None:
        """Let one worker make a checkpoint of the parts of all, or delete them if one has failed."""
        failure = next(iter(awaited.of(CallFailed).values()), CallFailed(asked.number, "", ""))
        pieces = [piece for part in awaited.of(PartWritten).values() for piece in part.pieces]
        row = asked.checkpoint
        finish = FinishSave(
            asked.number, row["directory"], pieces, failure.error_type, failure.error, row["tinker_path"]
        )
        self._ask(finish, [writer_of(asked.model_id, len(self.workers))])

    def _called(self, asked: Call, awaited: Awaited) -> list[Message]:
        failed, answered = awaited.of(CallFailed), awaited.of(Answer)
        if isinstance(asked, SaveModel | ExportModel) and answered and len(self.workers) > 1:
            self._tell_all(ForgetCheckpoint(asked.checkpoint["tinker_path"]))
        if failed and answered:
            rank, failure = next(iter(failed.items()))
            match asked:
                case CreateModel() | LoadModel() if asked.model_id not in self.loaded:
                    self._tell_all(DeleteModel(asked.base_model, asked.model_id))
                case TakeSnapshot() if asked.inflight and len(self.samplers) > 1:
                    self._break(
                        rank, f"samples of model {asked.model_id} would follow different weights: {failure.error}"
                    )
                    return []
                case OptimStep() | LoadModel():
                    self._break(
                        rank, f"model {asked.model_id} is not the same on all workers any more: {failure.error}"
                    )
                    return []
        if isinstance(asked, CreateModel | LoadModel) and not failed:
            self.loaded.add(asked.model_id)
        # The one that writes says more than the others
        if isinstance(asked, OptimStep | SaveModel | ExportModel) and not failed:
            return [answered[writer_of(asked.model_id, len(self.workers))]]
        return [next(iter((failed or answered).values()))]

    def _break(self, rank: int, reason: str) -> None:
        """End the group: what its workers hold is not the same."""
        self.workers[rank].fault = reason
        self.workers[rank].kill()


def cost(tokens: int) -> float:
    """Return the cost of a sequence, in tokens of a short one."""
    return tokens * (1 + tokens / QUADRATIC_TOKENS)


def image_cost(pixels: int, tokens: int) -> float:
    """Return the cost of an image that the vision tower has not computed, in tokens of a short sequence.

    It stands in a sequence of so many `tokens`, and models shrink images that are larger than they take: it has no more
    tokens.
    """
    computed = min(pixels, tokens * PIXELS_OF_A_TOKEN)
    return TOWER_COST * computed / PIXELS_OF_A_TOKEN * (1 + computed / QUADRATIC_PIXELS)


def divide(message: RunPass, count: int, most: int, everyone: bool = False) -> list[RunPass | None]:
    """Divide a pass among `count` workers; None for one that gets nothing, or an empty share if `everyone` takes part.

    The most expensive datum goes first, each to the worker that has then least to do among those whose share stays
    within `most` tokens, or else to the one with fewest tokens. An image of several datums costs a worker once. Datums
    keep their order within a share.
    """
    if count == 1:
        return [message]
    shares: list[list[int]] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    computed: list[set[str]] = [set() for _ in range(count)]
    of_images = _costs_of_images(message)
    alone = [cost(length) + sum(images.values()) for length, images in zip(message.lengths, of_images, strict=True)]
    for place in sorted(range(len(alone)), key=lambda place: -alone[place]):
        length, images = message.lengths[place], of_images[place]
        known = [sum(images[digest] for digest in images.keys() & there) for there in computed]
        roomy = [rank for rank in range(count) if tokens[rank] + length <= most]
        rank = (
            min(roomy, key=lambda rank: costs[rank] - known[rank])
            if roomy
            else min(range(count), key=tokens.__getitem__)
        )
        shares[rank].append(place)
        costs[rank] += alone[place] - known[rank]
        tokens[rank] += length
        computed[rank] |= images.keys()
    return [_part(message, sorted(places)) if places or everyone else None for places in shares]


def _costs_of_images(message: RunPass) -> list[Mapping[str, float]]:
    """Return the cost of each datum's new images, by digest."""
    if not message.pixels:
        return [{} for _ in message.lengths]
    pairs = zip(message.lengths, message.pixels, strict=True)
    return [{digest: image_cost(pixels, length) for digest, pixels in images.items()} for length, images in pairs]


def _part(message: RunPass, places: Sequence[int]) -> RunPass:
    """Return the share of these datums, without pixels, which were for dividing."""
    pieces, lengths = [message.pieces[place] for place in places], [message.lengths[place] for place in places]
    return RunPass(message.number, message.base_model, message.backward, pieces, lengths)


def same_outcome(one: PassDone, other: PassDone) -> bool:
    """Whether two workers that have computed the same datums agree which have a result and which have none."""
    return all(
        [(operation, index) for operation, index, *_ in of_one]
        == [(operation, index) for operation, index, *_ in of_other]
        for of_one, of_other in ((one.results, other.results), (one.failures, other.failures))
    )


def join(parts: Sequence[PassDone], tokens_per_pass: int) -> PassDone:
    """Join the results of a pass's shares. A pass of all workers may have `tokens_per_pass` tokens from now on."""
    losses, values, logprobs = [], [], []
    for part in parts:
        datums, numbers = len(part.results), sum(map(len, part.metrics))
        floats = np.frombuffer(part.payload, dtype=np.float64, count=datums + numbers)
        losses.append(floats[:datums].tobytes())
        values.append(floats[datums:].tobytes())
        logprobs.append(part.payload[floats.nbytes :])
    return PassDone(
        parts[0].number,
        [result for part in parts for result in part.results],
        [failure for part in parts for failure in part.failures],
        tokens_per_pass,
        [names for part in parts for names in part.metrics],
        [took for part in parts for took in part.took],
        b"".join((*losses, *values, *logprobs)),
    )
