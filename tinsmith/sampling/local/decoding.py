"""Decoding steps on the host: it tells the device to compute one, and reads later what was drawn.

Meanwhile it may tell the device to compute the next step, or anything else. A sequence that has left its row gets none
of the tokens that were drawn for it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.kernels.device import upload
from tinsmith.memory.budget import blocks_for
from tinsmith.models.base import BaseModel, threads_for
from tinsmith.models.batched_lora import BatchedAdapters, most_columns
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.sampling.choose import ROWS, Choice, choose_shaped, likeliest
from tinsmith.sampling.local.decode_graph import StepRunner
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows, rows_of
from tinsmith.sampling.local.device_batch import TOKEN, DeviceBatch
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.sequence import Seat, SequenceState
from tinsmith.sampling.local.states import StateSlots

log = logging.getLogger(__name__)


Drawn = tuple[SequenceState, int, float, tuple[list[int], list[float]] | Exception | None]
"""A sequence, its next token, the token's log-probability, and the likeliest tokens there, or why there are none."""


@dataclass(frozen=True, eq=False)
class Tops:
    """The likeliest tokens at the rows of a step that want them."""

    rows: dict[int, int]
    """Number of tokens that each row wants, in the order of `ids`."""
    ids: Tensor
    """[rows that want some, most that one wants], on the host once the step is done."""
    logprobs: Tensor


@dataclass(frozen=True, eq=False)
class Flight:
    """A step that the device was told to compute, and that the host has not read yet."""

    seats: tuple[Seat, ...]
    drawn: Tensor
    """[rows, 2] tokens and log-probabilities, on the host once the step is done."""
    tops: Tops | Exception | None
    done: torch.cuda.Event | None
    faults: Mapping[int, Exception]
    """Why rows with a shape have no token."""


class Decoding:
    """The batches of one sampler.

    The base and its adapters share one. Full weights, adapters that hold a NaN or find no room, and all adapters of a
    model that runs through transformers' modules or computes deterministically, have batches of their own.
    """

    def __init__(self, base: BaseModel, cache: KVCache, states: StateSlots | None, places: int, eager: bool) -> None:
        self.base = base
        self.cache = cache
        self.adapters = BatchedAdapters(base.layout, base.device, base.dtype, most_columns(base.layout, base.dtype))
        self.placed: dict[int, Adapter] = {}
        self.apart: dict[int, Weights] = {}
        self.step = DecodeStep(base, cache, states, self.adapters)
        self.captures = base.device.type == "cuda" and not eager and not base.deterministic
        self.run = StepRunner(self.step, self.captures)
        """Runs the steps of the base and its adapters. Its graphs stay when nothing runs."""
        self.places = places
        self.blocks = min(cache.total, blocks_for(base.max_context))
        self.scratch_slot = states.scratch if states else 0
        self.batches: dict[int, DeviceBatch] = {}
        """Batches by the id of weights that decode apart; 0 for all others."""
        self.runners: dict[int, StepRunner] = {}
        """Runners of weights that decode apart, by id."""

    def groups(self, running: Sequence[SequenceState]) -> list[list[SequenceState]]:
        """Group the sequences that share a step."""
        self._follow_owners({id(sequence.job.weights): sequence.job.weights for sequence in running})
        groups: dict[int, list[SequenceState]] = {}
        for sequence in running:
            groups.setdefault(self._key(sequence), []).append(sequence)
        return list(groups.values())

    def launch(self, sequences: Sequence[SequenceState]) -> Flight:
        """Tell the device to compute the next token of all sequences of one group.

        If it raises, no sequence has changed, and the flights under way must be collected before the next call.
        """
        key = self._key(sequences[0])
        batch = self.batches.get(key)
        if batch is None:
            batch = self.batches[key] = self._batch(self.places)
            if key:
                self.runners[key] = StepRunner(self.step, self.captures)
        return self._launch(batch, sequences, self.runners[key] if key else self.run)

    def launch_alone(self, sequences: Sequence[SequenceState]) -> Flight:
        """Launch a step for some of a group, after a step of all has failed."""
        for sequence in sequences:
            sequence.seat = None
        return self._launch(self._batch(len(sequences)), sequences, self.step)

    def _launch(
        self,
        batch: DeviceBatch,
        sequences: Sequence[SequenceState],
        run: Callable[[DeviceBatch, StepRows], Tensor | None],
    ) -> Flight:
        with torch.no_grad(), threads_for(self.base, len(sequences)):
            self.cache.clean()
            batch.follow(sequences)
            rows = rows_of(batch, self.apart.get(id(sequences[0].job.weights)))
            on_gpu = self.base.device.type == "cuda"
            drawn = torch.empty(rows.count, 2, dtype=torch.float64, pin_memory=on_gpu)
            done = torch.cuda.Event() if on_gpu else None
            batch.is_wrong = True
            logits = run(batch, rows)
            batch.is_wrong = False
            # The step is done: what fails from here on must not let it be computed again.
            faults = {} if logits is None else self._shape(batch, logits)
            drawn.copy_(batch.drawn[: rows.count], non_blocking=True)
            tops = None if logits is None else self._tops(batch, logits)
            if done is not None:
                done.record()
        for sequence in sequences:
            sequence.stored += 1
        return Flight(tuple(batch.seats), drawn, tops, done, faults)

    def _batch(self, places: int) -> DeviceBatch:
        return DeviceBatch(places, self.blocks, self.base.device, self.scratch_slot, self._columns)

    def _columns(self, sequence: SequenceState) -> tuple[int, int]:
        adapter = self.placed.get(id(sequence.job.weights))
        return (0, 0) if adapter is None else self.adapters.place(adapter) or (0, 0)

    def _key(self, sequence: SequenceState) -> int:
        owner = id(sequence.job.weights)
        return owner if owner in self.apart else 0

    def _follow_owners(self, owners: Mapping[int, Weights | None]) -> None:
        """Give columns to the adapters among these weights, by id, and take them from those that nothing runs with."""
        for gone in self.apart.keys() - owners.keys():
            del self.apart[gone]
            self.batches.pop(gone, None)
            self.runners.pop(gone, None)
        for gone in self.placed.keys() - owners.keys():
            self.adapters.forget(self.placed.pop(gone))
        for key, weights in owners.items():
            if weights is None or key in self.placed or key in self.apart:
                continue
            together = self.base.decoder is not None and not self.base.deterministic
            if together and isinstance(weights, Adapter) and self._find_room(weights):
                self.placed[key] = weights
            else:
                self.apart[key] = weights

    def _find_room(self, adapter: Adapter) -> bool:
        try:
            return self.adapters.place(adapter) is not None
        # It is not finite, there is no memory, or its matrices are misshapen
        except (UserError, RuntimeError) as error:
            log.warning("an adapter is decoded apart from others, which is slower: %s", error)
            return False

    def collect(self, flight: Flight) -> Iterator[Drawn]:
        """Wait until a step is done; yields what was drawn for the sequences that have not left meanwhile."""
        if flight.done is not None:
            flight.done.synchronize()
        tops = _lists(flight.tops) if isinstance(flight.tops, Tops) else {}
        for row, (seat, (token, logprob)) in enumerate(zip(flight.seats, flight.drawn.tolist(), strict=True)):
            if seat.taken:
                missing = flight.tops if isinstance(flight.tops, Exception) and seat.sequence.job.topk else None
                yield seat.sequence, int(token), logprob, flight.faults.get(row) or missing or tops.get(row)

    def rest(self) -> None:
        """Hold no weights and no sequences until something runs."""
        self._follow_owners({})
        for batch in self.batches.values():
            batch.forget()

    def clear(self) -> None:
        self.batches.clear()
        self.runners.clear()
        self._follow_owners({})

    def _shape(self, batch: DeviceBatch, logits: Tensor) -> dict[int, Exception]:
        """Draw again at the rows that have a shape; returns why some have no token."""
        faults: dict[int, Exception] = {}
        how: dict[int, Choice] = {}
        for seat in batch.seats:
            if seat.sequence.shape is not None:
                try:
                    how[seat.row] = seat.sequence.choice()
                except UserError as error:
                    faults[seat.row] = error
        shaped = list(how)
        for some in (shaped[start : start + ROWS] for start in range(0, len(shaped), ROWS)):
            try:
                rows = upload(np.array(some), logits.device)
                tokens, logprobs = choose_shaped(logits, rows, [how[row] for row in some])
                batch.drawn.index_copy_(0, rows, torch.stack([tokens.double(), logprobs.double()], dim=1))
                batch.state[:, TOKEN].index_copy_(0, rows, tokens)
            except RuntimeError as error:
                faults |= dict.fromkeys(some, error)
        return faults

    def _tops(self, batch: DeviceBatch, logits: Tensor) -> Tops | Exception | None:
        """Find the likeliest tokens at the rows that want them, or why there are none."""
        wanted = {seat.row: seat.sequence.job.topk for seat in batch.seats if seat.sequence.job.topk}
        if not wanted:
            return None
        rows = list(wanted)
        temperatures = [batch.seats[row].sequence.job.params.temperature or 1.0 for row in rows]
        try:
            ids, logprobs = likeliest(
                logits.index_select(0, upload(np.array(rows), logits.device)),
                upload(np.array(temperatures, dtype=np.float32), logits.device),
                max(wanted.values()),
            )
            return Tops(wanted, self._to_host(ids), self._to_host(logprobs))
        except RuntimeError as error:  # there is no memory for them
            return error

    def _to_host(self, values: Tensor) -> Tensor:
        """Copy to the host, where it is when the device has got so far."""
        if values.device.type == "cpu":
            return values.clone()
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _lists(tops: Tops) -> dict[int, tuple[list[int], list[float]]]:
    ids, logprobs = tops.ids.tolist(), tops.logprobs.tolist()
    return {row: (ids[i][:count], logprobs[i][:count]) for i, (row, count) in enumerate(tops.rows.items())}
