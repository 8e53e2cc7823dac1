"""States of gated delta nets: a slot for each running sequence, and saved states for others that begin alike.

A state cannot be shared or cut as keys and values can: it is what a layer remembers after exactly the tokens so far. So
a sequence owns a slot, and others begin with a copy, saved at the end of a full block under that block's key
(`sampling/prefix.py`). Saved states are evicted least recently used first.

A key that is written twice does no harm, but a state that is stepped twice is wrong for good, and nothing shows it. So
a pass reads the slots, and what it has computed replaces the states only when all of it has succeeded
(`StateSteps.commit`). Until then a slot holds the state after `SequenceState.stored` tokens, and a failed pass can be
tried again in any pieces. The price is memory for a second state of each sequence in a pass.

A decoding step that is not tried again steps states in place. On CUDA Triton kernels compute it
(`kernels/delta_step.py`), elsewhere the references; which slot is a row's is read on the device, so that a CUDA graph
can capture it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.kernels.device import reserve_zeros
from tinsmith.kernels.dispatch import on_kernels
from tinsmith.memory.budget import CacheShape
from tinsmith.models.delta_rule import convolve, gated_delta_rule


class StateSlots:
    """The slots of one model: free, taken by a sequence, or saved under a key."""

    def __init__(self, shape: CacheShape, slots: int) -> None:
        kind = shape.delta_net
        if kind is None:
            raise ValueError(f"a model without gated delta nets keeps no states: {shape.layers}")
        self.index = {number: index for index, number in enumerate(shape.delta_layers)}
        """Index of a layer's states by its number."""
        layers = len(self.index)
        self.scratch = slots
        """A slot more, for rows of a batch that nobody has."""
        self.inputs = reserve_zeros((layers, slots + 1, kind.taps - 1, kind.channels), shape.dtype, shape.device)
        self.memory = reserve_zeros(
            (layers, slots + 1, kind.value_heads, kind.key_dim, kind.value_dim), torch.float32, shape.device
        )
        self.total = slots
        self.free: list[int] = []
        self.saved: OrderedDict[bytes, int] = OrderedDict()
        """Slots of saved states by the key of the block before them, least recently used first."""
        self.clear()

    @property
    def available(self) -> int:
        """Number of slots that `take` can give."""
        return len(self.free) + len(self.saved)

    def clear(self) -> None:
        self.free = list(range(self.total - 1, -1, -1))
        self.saved.clear()

    def take(self, source: bytes | None) -> int:
        """Take a slot with the state saved under `source`, or with zeros for a sequence that begins.

        Raises KeyError when none is `available`. If it fails, no slot is taken.
        """
        if source is not None:
            self.saved.move_to_end(source)
        if not self.free:
            oldest, slot = self.saved.popitem(last=False)
            if oldest == source:
                return slot  # nothing else is left: the saved state itself goes on
            self.free.append(slot)
        slot = self.free[-1]
        if source is None:
            self.inputs[:, slot].zero_()
            self.memory[:, slot].zero_()
        else:
            self.copy(self.saved[source], slot)
        self.free.pop()
        return slot

    def give_back(self, slot: int) -> None:
        """Free the slot of a sequence that has ended or waits."""
        self.free.append(slot)

    def copy(self, source: int, target: int) -> None:
        self.inputs[:, target].copy_(self.inputs[:, source])
        self.memory[:, target].copy_(self.memory[:, source])

    def save(self, key: bytes, slot: int) -> bool:
        """Save a copy of a state, over the least recently used one if there is no free slot.

        Returns False if it is saved already or all slots are taken.
        """
        if key in self.saved:
            self.saved.move_to_end(key)
            return False
        if not self.available:
            return False
        if not self.free:
            self.free.append(self.saved.popitem(last=False)[1])
        self.copy(slot, self.free[-1])
        self.saved[key] = self.free.pop()
        return True

    def forget(self, key: bytes) -> None:
        """Free the slot of a saved state, which may be evicted already."""
        slot = self.saved.pop(key, None)
        if slot is not None:
            self.free.append(slot)

    def longest(self, keys: Sequence[bytes]) -> int:
        """Count the first of these blocks that lie before the last saved state among them; 0 if none is saved."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self.saved), 0)


class StatefulPlan:
    """The part of a `PassPlan` that gated delta nets follow."""

    def __init__(self, steps: "StateSteps | StepsInPlace | None") -> None:
        self.steps = steps

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        assert self.steps, "a gated delta net needs states"
        return self.steps.convolve(layer, x, weight)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        assert self.steps, "a gated delta net needs states"
        return self.steps.delta_rule(layer, query, key, value, decay, beta)

    def commit(self) -> None:
        """Let the slots hold the states after the pass, all of which has succeeded."""
        if self.steps:
            self.steps.commit()


class StateSteps:
    """One pass: the states before its windows are read from the slots, those after them wait for `commit`."""

    def __init__(self, states: StateSlots, slots: Tensor, lengths: list[int]) -> None:
        """The slot of each window's sequence [windows], no slot twice, and the tokens of each window."""
        self.states = states
        self.slots = slots
        self.lengths = tuple(lengths)
        self.inputs: dict[int, Tensor] = {}
        """States after the pass by layer: [windows, taps - 1, channels]."""
        self.memory: dict[int, Tensor] = {}
        """States after the pass by layer: [windows, value_heads, key_dim, value_dim]."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        before = self.states.inputs[self.states.index[layer]].index_select(0, self.slots)
        out, self.inputs[layer] = convolve(x, weight, self.lengths, before)
        return out

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        before = self.states.memory[self.states.index[layer]].index_select(0, self.slots)
        out, self.memory[layer] = gated_delta_rule(query, key, value, decay, beta, self.lengths, before)
        return out

    def commit(self) -> None:
        """Write the states of all layers. This takes no memory, so it does not fail where the pass has not."""
        for layer, index in self.states.index.items():
            self.states.inputs[index].index_copy_(0, self.slots, self.inputs[layer])
            self.states.memory[index].index_copy_(0, self.slots, self.memory[layer])


# One token of each row, in place


class StepsInPlace:
    """Steps the states of gated delta nets where they lie, for a step that is not tried again."""

    def __init__(self, states: StateSlots, slots: Tensor) -> None:
        """`slots` [rows] are those of the rows; rows that nobody has may share one."""
        self.states = states
        self.slots = slots

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return convolve_step(x, weight, self.states.inputs[self.states.index[layer]], self.slots)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return delta_step(query, key, value, decay, beta, self.states.memory[self.states.index[layer]], self.slots)

    def commit(self) -> None:
        """The states are those after the step already."""


def convolve_step(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """Convolve one new input of each row, then SiLU: x [rows, channels], weight [channels, taps] -> [rows, channels].

    inputs [slots, taps - 1, channels] are the last ones of every slot, in place; `slots` [rows] says which is whose.
    """
    if on_kernels("delta_step", x):
        from tinsmith.kernels.delta_step import convolve_kernel

        return convolve_kernel(x, weight, inputs, slots)
    return convolve_step_reference(x, weight, inputs, slots)


def convolve_step_reference(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """Compute `convolve_step` in PyTorch."""
    index = slots.long()
    out, after = convolve(x, weight, (1,) * len(x), inputs.index_select(0, index))
    inputs.index_copy_(0, index, after.to(inputs.dtype))
    return out


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor
) -> Tensor:
    """Apply the gated delta rule to one token of each row: [rows, value_heads, value_dim].

    query and key [rows, key_heads, key_dim], value [rows, value_heads, value_dim], decay (a logarithm) and beta [rows,
    value_heads]. memory [slots, value_heads, key_dim, value_dim] float32 holds the states of every slot, in place;
    `slots` [rows] says which is whose.
    """
    if on_kernels("delta_step", query):
        from tinsmith.kernels.delta_step import delta_kernel

        return delta_kernel(query, key, value, decay, beta, memory, slots)
    return delta_step_reference(query, key, value, decay, beta, memory, slots)


def delta_step_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor
) -> Tensor:
    """Compute `delta_step` in PyTorch."""
    index = slots.long()
    out, after = gated_delta_rule(query, key, value, decay, beta, (1,) * len(query), memory.index_select(0, index))
    memory.index_copy_(0, index, after.to(memory.dtype))
    return out
