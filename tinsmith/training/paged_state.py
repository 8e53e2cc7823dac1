"""Moves the training state of LoRA models between a device and the memory of its host, by last use.

A pass, a step, a snapshot or a copy first brings the models that it needs (`StatePager.bring`). Where they lack room,
those that were used least recently are paged out: masters, moments and accumulated gradients travel, and the working
copies, which masters become when they are rounded, are made anew.

All tensors and the views of them stay the same objects: what is paged out has a storage without memory. Code that used
it all the same would fail, and could not read numbers of another time.

On a GPU a stream of its own copies from and to pinned memory, beside the pass that the device computes meanwhile. What
it allocates comes from what it has freed before, in the order of that stream. So it must wait for the other stream
before it frees memory, and before it uses memory again that the other one has freed (`StatePager.freed`).
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.kernels.device import Stopwatch
from tinsmith.memory.budget import ModelBytes, paged_out_at_most
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.models.lora import Adapter
from tinsmith.models.machine import free_memory, give_back_pinned_memory, size_text
from tinsmith.training.compact import Optimizer
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.update_check import ENTRIES

log = logging.getLogger(__name__)

PIECE = 2**20
"""Numbers of each pinned tensor: PyTorch rounds its size up to a power of two, which a large one would pay for."""


@dataclass(eq=False)
class PagedModel:
    """A LoRA model that may leave the device."""

    optimizer: ModelOptimizer
    weights: Adapter
    size: ModelBytes
    on_host: Mapping[int, list[Tensor]] | None = None
    """The pieces of each tensor, by its identity; None while the model is on the device."""
    used: Any = None
    """The event behind its last use on a GPU."""

    @property
    def travelling(self) -> list[Tensor]:
        """The tensors of which each number counts: masters, moments, sums of gradients."""
        moments = [state[entry] for state in self.optimizer.adamw.state.values() if state for entry in ENTRIES]
        return [self.weights.flat, *moments, *(self.optimizer.accumulator.totals or ())]

    @property
    def all(self) -> list[Tensor]:
        """The same, and the working copies where they are others."""
        copies = self.weights.flat_working
        return self.travelling + ([copies] if copies.dtype != self.weights.flat.dtype else [])

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes in host memory now."""
        return sum(piece.nbytes for pieces in (self.on_host or {}).values() for piece in pieces)


class StatePager:
    """The LoRA models of all bases of a device: which of them are on it, and which wait in host memory."""

    def __init__(
        self, device: torch.device, room: float = inf, host_room: float = 0, free: Callable[[], float] = lambda: inf
    ) -> None:
        """Let models take `room` bytes of the device, and `host_room` of its host; without any, none is paged out.

        `free` returns the bytes of the device that nothing will take but models.
        """
        self.device = device
        self.room = room
        self.host_room = host_room
        self.free = free
        self.models: OrderedDict[Optimizer, PagedModel] = OrderedDict()
        """The last one used last."""
        self.page_ins = 0
        self.page_outs = 0
        self._current: list[PagedModel] = []
        """Models that are used now."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and host_room else None
        self._watches: deque[Stopwatch] = deque()
        self._seconds = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether a model may be paged out."""
        return self.host_room > 0

    def require_place(self, size: ModelBytes, former: Optimizer | None = None) -> None:
        """Raise UserError if device and host have no place for one more model, which replaces `former`, if given."""
        if not self.is_limited:
            return
        sizes = [model.size.training for optimizer, model in self.models.items() if optimizer is not former]
        needed = paged_out_at_most([*sizes, size.training], self.room)
        if needed > self.host_room:
            raise UserError(
                f"{len(sizes)} LoRA models are loaded, and one more of {size.training / 2**30:.4g} GiB has no place: "
                f"up to {needed / 2**30:.4g} GiB would have to wait in host memory, where they may take "
                f"{self.host_room / 2**30:.4g} (--paged-state-share); end other models or take a smaller rank"
            )

    def add(self, optimizer: ModelOptimizer, weights: Adapter, size: ModelBytes) -> None:
        """Take in a new model, which is on the device."""
        self.models[optimizer] = model = PagedModel(optimizer, weights, size)
        self._current.append(model)

    def forget(self, optimizer: Optimizer | None) -> None:
        """Let a model go, wherever it is; it may be none of these."""
        if optimizer is not None and optimizer in self.models:
            del self.models[optimizer]
            self._current = [model for model in self._current if model.optimizer is not optimizer]
            self.freed()

    def is_on_device(self, optimizer: Optimizer) -> bool:
        """Whether it is there: also one that never leaves."""
        model = self.models.get(optimizer)
        return model is None or model.on_host is None

    def bring(self, optimizers: Iterable[Optimizer]) -> None:
        """Let the device have these models until the next ones are brought, and all that they may come to take.

        Others leave it for that. If memory runs out, each model is as it was, on the device or the host.
        """
        self._note_use()
        self._current = [self.models[each] for each in dict.fromkeys(optimizers) if each in self.models]
        for model in self._current:
            self.models.move_to_end(model.optimizer)
        for model in self._current:
            if model.on_host is not None:
                self.make_room(model.size)
                self._page_in(model)

    def make_room(self, size: ModelBytes) -> None:
        """Page out models that are not used now until one more of this size fits, or none is left."""
        self._page_out_until(lambda: self._taken() + size.training <= self.room and size.training <= self.free())

    def make_way(self, needed: int) -> None:
        """Page out models that are not used now until that many bytes are free, or none is left."""
        self._page_out_until(lambda: needed <= self.free())

    def leave_only(self, optimizers: Iterable[Optimizer]) -> bool:
        """Page out all models but these; returns whether there were any that host memory has taken."""
        before, kept = self.page_outs, {self.models[each] for each in optimizers if each in self.models}
        self._page_out_until(lambda: False, kept)
        return self.page_outs > before

    def fitting(self, optimizers: Sequence[Optimizer]) -> list[list[int]]:
        """Divide these, as indices, into groups whose models fit the device together, each model in one of them.

        Where models are at the moment makes no difference. One that is larger than all the room has a group to itself.
        """
        groups: list[list[int]] = []
        group_of: dict[Optimizer, list[int]] = {}
        taken = 0
        for index, optimizer in enumerate(optimizers):
            if optimizer not in group_of:
                size = self.models[optimizer].size.training if optimizer in self.models else 0
                if not groups or taken + size > self.room:
                    groups.append([])
                    taken = 0
                taken += size
                group_of[optimizer] = groups[-1]
            group_of[optimizer].append(index)
        return groups

    def freed(self) -> None:
        """Note that what is done now frees memory of models: copies to come wait until the device is done with it."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def facts(self) -> dict[str, int]:
        """Numbers for the status: models by place, bytes in host memory, moves and what they took.

        Empty if none is ever paged out.
        """
        if not self.is_limited:
            return {}
        while self._watches and (seconds := self._watches[0].seconds) is not None:
            self._seconds += seconds
            self._watches.popleft()
        waiting = [model for model in self.models.values() if model.on_host is not None]
        return {
            "on_device": len(self.models) - len(waiting),
            "in_host_memory": len(waiting),
            "host_bytes": sum(model.host_bytes for model in waiting),
            "page_ins": self.page_ins,
            "page_outs": self.page_outs,
            "milliseconds": round(1000 * self._seconds),
        }

    def _taken(self) -> int:
        """Bytes of the device that the models on it take, or will when they have taken a step."""
        return sum(model.size.training for model in self.models.values() if model.on_host is None)

    def _note_use(self) -> None:
        if self._copies is not None and self._current:
            event = torch.cuda.current_stream(self.device).record_event()
            for model in self._current:
                model.used = event

    def _page_out_until(self, enough: Callable[[], bool], kept: Iterable[PagedModel] | None = None) -> None:
        """Page out the models used least recently, but those `kept`, or else those used now."""
        if not self.is_limited:
            return
        self._note_use()
        stays = set(self._current if kept is None else kept)
        for model in [each for each in self.models.values() if each.on_host is None and each not in stays]:
            if enough() or not self._page_out(model):
                return

    @torch.no_grad()
    def _page_out(self, model: PagedModel) -> bool:
        """Move a model to host memory; False, and all as it was, if that has no room."""
        tensors = model.travelling
        held, size = sum(other.host_bytes for other in self.models.values()), sum(tensor.nbytes for tensor in tensors)
        if held + size > self.host_room:
            return False
        try:
            _require_host(size)
            pieces = {id(tensor): self._host_pieces(tensor) for tensor in tensors}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("host memory ends: a model stays on %s that others need the room of: %s", self.device, error)
            return False
        if self._copies is not None:
            self._copies.wait_event(model.used)
        with self._copying():
            for tensor in tensors:
                for piece, place in zip(tensor.split(PIECE), pieces[id(tensor)], strict=True):
                    place.copy_(piece, non_blocking=True)
        for tensor in model.all:
            if self._copies is not None:
                tensor.record_stream(self._copies)
            tensor.untyped_storage().resize_(0)
        model.on_host = pieces
        self.page_outs += 1
        return True

    def _host_pieces(self, tensor: Tensor) -> list[Tensor]:
        pinned = self.device.type == "cuda"
        return [torch.empty(len(piece), dtype=piece.dtype, pin_memory=pinned) for piece in tensor.split(PIECE)]

    @torch.no_grad()
    def _page_in(self, model: PagedModel) -> None:
        """Move a model back. If memory runs out, it stays in host memory."""
        assert model.on_host is not None
        with self._copying():
            storages = []
            try:
                for tensor in model.all:
                    storages.append(tensor.untyped_storage())
                    storages[-1].resize_(tensor.nbytes)
            except (RuntimeError, MemoryError):
                for storage in storages:
                    storage.resize_(0)
                raise
            for tensor in model.travelling:
                for piece, place in zip(tensor.split(PIECE), model.on_host[id(tensor)], strict=True):
                    piece.copy_(place, non_blocking=True)
            model.weights.refresh()
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._copies)
        model.on_host = None
        self.page_ins += 1

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Let the body copy beside what the device computes, and measure its time."""
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            watch = Stopwatch(self.device)
            yield
            watch.stop()
            self._watches.append(watch)


def _require_host(size: int) -> None:
    """Raise MemoryError if the host lacks so many bytes, which Linux may promise and end the process for."""
    host = torch.device("cpu")
    if size > free_memory(host):
        give_back_pinned_memory()  # of models that came back
    if size > (free := free_memory(host)):
        raise MemoryError(f"{size_text(size)} are needed, and {size_text(max(0, free))} are free")
