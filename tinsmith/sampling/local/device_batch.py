"""The running sequences as rows of tensors on the device: what a decoding step reads, and what it changes itself.

A sequence that starts to run gets a row, a `Seat`. Then the device advances token and length by itself, and the host
only says what the device cannot know, such as a new block, in one copy behind the step that is being computed. Rows are
compact: when a sequence leaves, the last row takes its place.

Dead rows, which nobody has, compute a sequence of one token in the scratch block and the scratch slot, for ever.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.memory.budget import BLOCK
from tinsmith.sampling.local.sequence import Seat, SequenceState

(
    TOKEN,  # the newest token, which the next step computes
    LENGTH,  # tokens of prompt and answer, that one included
    ADVANCE,  # 1; 0 for a dead row, which stays as it is
    POSITION,  # what to add to the length for the rotary position
    DRAWN,  # what to add to the length for the number of tokens drawn so far
    SEED,
    SAMPLE,
    TOP_K,
    TEMPERATURE,  # these two are the bits of a float64
    TOP_P,
    SLOT,  # of its state
    COLUMNS,  # of its adapter (`models/batched_lora.py`): from this one
    _,  # to this one, which is not included
    FIELDS,
) = range(14)

Columns = tuple[int, int]
"""The first column of an adapter and the one behind its last. Equal numbers mean the base."""


class DeviceBatch:
    """Rows for so many sequences."""

    def __init__(
        self,
        places: int,
        blocks: int,
        device: torch.device,
        scratch_slot: int,
        columns: Callable[[SequenceState], Columns],
    ) -> None:
        """`blocks` is the most that one sequence has; `columns` says which are those of its adapter."""
        self.device = device
        self.columns = columns
        self.scratch_slot = scratch_slot
        self.state = upload(np.tile(self.dead_row(), (places, 1)), device)
        """[places, FIELDS] int64"""
        self.table = torch.zeros(places, blocks + 1, dtype=torch.int32, device=device)
        """The blocks of each row, in order, then the scratch block: an ended sequence may write one token there."""
        self.drawn = torch.zeros(places, 2, dtype=torch.float64, device=device)
        self.seats: list[Seat] = []
        self.is_wrong = False
        """A step has failed: what the rows hold means nothing."""

    def dead_row(self) -> NDArray[np.int64]:
        row = np.zeros(FIELDS, dtype=np.int64)
        row[LENGTH], row[TOP_K], row[SLOT] = 1, -1, self.scratch_slot
        row[[TEMPERATURE, TOP_P]] = np.ones(2).view(np.int64)
        return row

    def follow(self, running: Sequence[SequenceState]) -> None:
        """Let the rows be those of these sequences, which all have a block for their newest token.

        If it raises, the rows are wrong, and the next call writes all of them anew.
        """
        if self.is_wrong:
            for seat in self.seats:
                if seat.taken:
                    seat.sequence.seat = None
            self.seats = []
        before = len(self.seats)
        free = [seat.row for seat in self.seats if not seat.taken]
        joining = [sequence for sequence in running if sequence.seat is None]
        was_wrong, self.is_wrong = self.is_wrong, True
        joined = self._seat(joining, free)
        moves = self._close_gaps(free[len(joining) :])
        dead = range(len(self.seats), len(self.state) if was_wrong else before)
        places, blocks = self._new_blocks()
        self._send(moves, dead, joined, places, blocks)
        self.is_wrong = False

    def forget(self) -> None:
        """Free all rows; the next call of `follow` writes them anew."""
        for seat in self.seats:
            if seat.taken:
                seat.sequence.seat = None
        if self.seats:
            self.seats, self.is_wrong = [], True

    def _seat(self, joining: Sequence[SequenceState], free: Sequence[int]) -> list[Seat]:
        joined = []
        for index, sequence in enumerate(joining):
            seat = sequence.seat = Seat(sequence, free[index] if index < len(free) else len(self.seats))
            if seat.row == len(self.seats):
                self.seats.append(seat)
            else:
                self.seats[seat.row] = seat
            joined.append(seat)
        return joined

    def _close_gaps(self, gaps: Sequence[int]) -> list[tuple[int, int]]:
        """Move the last rows into the gaps, which ascend; returns from where to where."""
        moves = []
        for gap in gaps:
            while self.seats and not self.seats[-1].taken:
                self.seats.pop()
            if gap >= len(self.seats):
                break
            moved = self.seats.pop()
            moves.append((moved.row, gap))
            moved.row = gap
            self.seats[gap] = moved
        return moves

    def _new_blocks(self) -> tuple[list[int], list[int]]:
        """Return the blocks that rows do not know yet: where each belongs in the flat table, and its number."""
        places: list[int] = []
        numbers: list[int] = []
        width = self.table.shape[1]
        for seat in self.seats:
            blocks = seat.sequence.blocks
            if seat.blocks < len(blocks):
                start = seat.row * width
                places.extend(range(start + seat.blocks, start + len(blocks) + 1))
                numbers.extend(blocks[seat.blocks :])
                numbers.append(0)
                seat.blocks = len(blocks)
        return places, numbers

    def _send(
        self,
        moves: Sequence[tuple[int, int]],
        dead: Iterable[int],
        joined: Sequence[Seat],
        places: Sequence[int],
        blocks: Sequence[int],
    ) -> None:
        """Change rows and table in one copy."""
        gone = [*dead]
        sources, targets = zip(*moves, strict=True) if moves else ((), ())
        rows = [seat.row for seat in joined]
        if not (moves or gone or rows or places):
            return
        parts = [np.array(part, dtype=np.int64) for part in (sources, targets, gone, rows, places, blocks)]
        values = [self._row(seat.sequence) for seat in joined]
        sent = upload(np.concatenate([*parts, *values]), self.device)
        source, target, gone_rows, new_rows, where, numbers, state = sent.split(
            [*map(len, parts), len(values) * FIELDS]
        )
        if moves:
            self.state.index_copy_(0, target, self.state.index_select(0, source))
            self.table.index_copy_(0, target, self.table.index_select(0, source))
        if gone:
            self.state.index_copy_(0, gone_rows, upload(np.tile(self.dead_row(), (len(gone), 1)), self.device))
            self.table.index_fill_(0, gone_rows, 0)
        if rows:
            self.state.index_copy_(0, new_rows, state.view(-1, FIELDS))
        if places:
            self.table.view(-1).index_copy_(0, where, numbers.to(torch.int32))

    def _row(self, sequence: SequenceState) -> NDArray[np.int64]:
        job = sequence.job
        row = np.empty(FIELDS, dtype=np.int64)
        row[TOKEN], row[LENGTH], row[ADVANCE] = sequence.tokens[-1], sequence.length, 1
        row[POSITION] = job.rendered.next_position - len(job.rendered) - 1
        row[DRAWN] = -len(job.rendered)
        row[SEED] = np.array(job.seed, dtype=np.uint64).view(np.int64)
        row[COLUMNS : COLUMNS + 2] = self.columns(sequence)
        row[SAMPLE], row[TOP_K], row[SLOT] = sequence.index, job.params.top_k, max(sequence.slot, 0)
        row[[TEMPERATURE, TOP_P]] = (
            np.array([job.params.temperature, job.params.top_p], dtype=np.float32).astype(np.float64).view(np.int64)
        )
        return row


def write_places(state: Tensor, table: Tensor) -> Tensor:
    """Return the place [rows] int64 of each row's newest token in `DeviceBatch`: block · BLOCK + offset."""
    last = state[:, LENGTH] - 1
    block = table.gather(1, (last // BLOCK).unsqueeze(1)).squeeze(1)
    return block * BLOCK + last % BLOCK
