"""AdamW for full-parameter training in little memory: 8-bit moments, gradients in the precision of the base.

In bfloat16 a parameter takes 2 bytes for the weight that passes read, 2 for the rest of its float32 master
(`models/full.py`), 2 for both moments (`encode`) and 2 for its gradient: 8 in place of 18. Sums of gradients are
rounded up or down by chance: rounded to the nearest, small ones would all be lost beside a large sum.

A step goes through the parameters in pieces, which are float32 meanwhile. Moments and rests may lie in host memory; the
pieces then travel. What chance decides is a function of the number of the step, so that a resumed run takes the same
steps as an undisturbed one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tinsmith.kernels.adamw_formula import Factors, step_as_written
from tinsmith.memory.budget import MOMENT_BLOCK, full_bytes
from tinsmith.models.full import FullState, FullWeights, SplitMasters, join, split, state_device
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.optimizer import (
    STEP_FAILED,
    GradientAccumulator,
    ModelOptimizer,
    apart,
    fatal,
    require_finite_norm,
)
from tinsmith.training.update_check import ENTRIES, MOMENTS, Bounds, clip_scale, require_finite_step

# Moments of AdamW in 8 bits a number: logarithms, scaled by the largest number of each block of 256.
#
# A number is |x| / scale = 2^-((top - code) · octaves / (top - 1)), with code 0 for 0: neighbouring codes are 9 % apart
# for first moments (a sign and 7 bits, over 16 octaves), and 12 % for second moments (8 bits, over 40 octaves), of
# which the update takes the root.
#
# Numbers between two codes are rounded up or down by chance, so that the expectation is exact: the change of a moment
# in one step is often smaller than the distance of two codes. A second moment that is not 0 never becomes 0, because
# the update divides by its root. Rounding numbers that came from codes to the nearest code gives these codes.

BLOCK = MOMENT_BLOCK
"""Numbers that share a scale."""


@dataclass(frozen=True)
class Code:
    """Encoding of numbers in 8 bits."""

    top: int
    """The code of the largest number of a block."""
    octaves: float
    """Octaves between the largest and the smallest number that is not 0."""
    signed: bool

    @property
    def octaves_each(self) -> float:
        """Octaves between neighbouring codes."""
        return self.octaves / (self.top - 1)


FIRST, SECOND = Code(127, 16.0, signed=True), Code(255, 40.0, signed=False)


def decode(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    """Turn codes [blocks, width] uint8 and scales [blocks, 1] into numbers [blocks, width] float32."""
    wide = codes.to(torch.int32)
    level = wide & code.top
    size = torch.where(level == 0, 0.0, torch.exp2((level - code.top).float() * code.octaves_each) * scales)
    return torch.where(wide > code.top, -size, size) if code.signed else size


def encode(values: Tensor, code: Code, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn numbers [blocks, width] float32 into codes uint8 and scales [blocks, 1].

    `chance` [blocks, width] in [0, 1) decides which of the two neighbours a number becomes; None means the nearest.
    """
    size = values.abs()
    scales = size.amax(-1, keepdim=True)
    share = size / torch.where(scales == 0, 1.0, scales)  # [blocks, width], 0 to 1
    place = code.top + torch.log2(share) / code.octaves_each
    low = place.floor().clamp(0, code.top)
    lower = torch.where(low == 0, 0.0, torch.exp2((low - code.top) * code.octaves_each))
    upper = torch.exp2((low + 1 - code.top) * code.octaves_each)
    up = (share - lower) / (upper - lower) > (0.5 if chance is None else chance)
    level = (low + up).clamp(0 if code.signed else 1, code.top)
    level = torch.where(share == 0, 0.0, level).to(torch.uint8)
    return torch.where(values < 0, level + (code.top + 1), level) if code.signed else level, scales


def chances(like: Tensor, seed: Tensor) -> Tensor:
    """Numbers in [0, 1) in the shape of `like` [blocks, width], from `seed` [] int64 and their place.

    The same on every device: a 32-bit mixing function (Wellons, "lowbias32") of the place plus the seed.
    """
    blocks, width = like.shape
    x = torch.arange(blocks * width, device=like.device).view(blocks, width) + seed & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return ((x ^ x >> 16) >> 8).float() * 2**-24


# The optimizer that keeps its moments so.

PIECE = {"cpu": 2**18, "cuda": 2**23}
"""Numbers of a tensor that are float32 at a time: few enough to take little memory, enough to keep the device busy."""
STEP_BUFFERS = 16
"""A step of one piece takes at most so many times the memory of the piece in float32; a test counts it."""
MIX = 0x9E3779B97F4A7C15
"""Multiplier that makes unrelated seeds of consecutive numbers (the golden ratio, as in SplitMix64)."""


def _seed(*numbers: int) -> int:
    """A seed of 31 bits."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ number) * MIX + 0xD1B54A32D192ED03) % 2**64
        seed ^= seed >> 29
    return seed >> 33


def _pieces(count: int, size: int) -> Iterator[tuple[slice, int]]:
    """Stretches of a flat tensor of `count` numbers and their row width: whole blocks, then what is left of one."""
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, size):
        yield slice(start, min(start + size, whole)), BLOCK
    if whole < count:
        yield slice(whole, count), count - whole


class Moments:
    """Both moments of one tensor, as flat codes and the scales of their blocks."""

    def __init__(self, count: int, where: torch.device, pinned: bool) -> None:
        """Begin with 0. Host memory is `pinned` where a GPU reads and writes it beside its work."""
        self.codes = [torch.zeros(count, dtype=torch.uint8, device=where, pin_memory=pinned) for _ in range(2)]
        self.scales = [torch.zeros(-(-count // BLOCK), device=where, pin_memory=pinned) for _ in range(2)]

    def read(self, piece: slice, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Decode both to float32 on `device`, [blocks, width] each."""
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        first, second = (
            decode(
                codes[piece].to(device, non_blocking=True).view(-1, width),
                scales[blocks].to(device, non_blocking=True).view(-1, 1),
                code,
            )
            for codes, scales, code in zip(self.codes, self.scales, (FIRST, SECOND), strict=True)
        )
        return first, second

    def write(self, piece: slice, number: int, values: Tensor, chance: Tensor | None) -> None:
        """Keep the first (0) or second (1) moment [blocks, width], rounded by `chance`; None for the nearest code."""
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        codes, scales = encode(values, (FIRST, SECOND)[number], chance)
        self.codes[number][piece].copy_(codes.view(-1), non_blocking=True)
        self.scales[number][blocks].copy_(scales.view(-1), non_blocking=True)

    def decoded(self, number: int, device: torch.device) -> Tensor:
        """Decode one of them to a flat tensor in float32 on `device`."""
        found = torch.empty(len(self.codes[number]), device=device)
        for piece, width in _pieces(len(found), PIECE[device.type]):
            found[piece] = self.read(piece, width, device)[number].view(-1)
        return found

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.codes, *self.scales]


class DecodedMoments(Mapping[str, Tensor]):
    """AdamW's moments by the names of `ModelOptimizer.moments`. Each is decoded when it is asked for."""

    def __init__(self, optimizer: "CompactOptimizer") -> None:
        self.optimizer = optimizer

    def __getitem__(self, name: str) -> Tensor:
        tensor, _, entry = name.rpartition(".")
        optimizer = self.optimizer
        leaf = optimizer.weights.working[tensor]
        if entry == "step":
            return torch.tensor(float(optimizer.steps))
        optimizer.wait()
        return optimizer.remembered[tensor].decoded(ENTRIES.index(entry), leaf.device).view(leaf.shape)

    def __iter__(self) -> Iterator[str]:
        return (f"{name}.{entry}" for name in self.optimizer.remembered for entry in MOMENTS)

    def __len__(self) -> int:
        return 3 * len(self.optimizer.remembered)


class CompactOptimizer:
    """Optimizer of one full-parameter model that needs less memory than `ModelOptimizer`."""

    sums_passes = False

    def __init__(self, weights: FullWeights, state: FullState, moments: Mapping[str, Tensor] | None = None) -> None:
        """Start anew, or from the `moments` of a saved model, in whatever state that was."""
        self.weights = weights
        self.state = state
        self.device = weights.leaves()[0].device
        self.accumulator = RoundingAccumulator(weights)
        self.bounds: Bounds | None = None
        self.steps = 0
        self.remembered: dict[str, Moments] = {}
        """Moments by tensor; empty before the first step."""
        if moments:
            self._remember(moments)

    def _remember(self, moments: Mapping[str, Tensor]) -> None:
        self.remembered = self._new_moments()
        for name, kept in self.remembered.items():
            self.steps = self.accumulator.steps = int(moments[f"{name}.step"])
            for number, entry in enumerate(ENTRIES):
                moment = moments[f"{name}.{entry}"].reshape(-1)
                for piece, width in _pieces(len(moment), PIECE[self.device.type]):
                    kept.write(piece, number, moment[piece].to(self.device, torch.float32).view(-1, width), None)

    def _new_moments(self) -> dict[str, Moments]:
        where = state_device(self.device, self.state)
        return {
            name: Moments(leaf.numel(), where, pinned=where != self.device)
            for name, leaf in self.weights.working.items()
        }

    def moments(self) -> Mapping[str, Tensor]:
        """AdamW's moments, decoded; empty before the first step."""
        return DecodedMoments(self)

    @property
    def has_moments(self) -> bool:
        """Whether a step has been taken."""
        return bool(self.remembered)

    @property
    def unclaimed(self) -> int:
        """Bytes of the device that the model will take when it is trained, beyond what it holds now."""
        held = [tensor for kept in self.remembered.values() for tensor in kept.tensors if tensor.device == self.device]
        holds = self.weights.nbytes + self.accumulator.nbytes + sum(tensor.nbytes for tensor in held)
        return full_bytes(self.weights.parameter_count, self.weights.dtype, self.state).device - holds

    def claim_moments(self) -> None:
        self.remembered = self.remembered or self._new_moments()

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update the weights and clear the accumulators; as `ModelOptimizer.step`.

        Raises DeviceLostError if it fails halfway, as another thread took the memory: the weights are then of no step.
        """
        totals = self.accumulator.take()
        if totals is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        grad_norm = self._norm(totals)
        require_finite_norm(grad_norm)
        clip = clip_scale(grad_norm, settings)
        bounds = self._checked(totals, grad_norm, clip, settings)
        remembered = self.remembered or self._new_moments()  # which may run out of memory, before anything has changed
        # So much is free for the pieces. Some of their tensors are int64: twice the memory of a piece in one stretch.
        buffers = [
            torch.empty(PIECE[self.device.type], dtype=torch.int64, device=self.device)
            for _ in range(STEP_BUFFERS // 2)
        ]
        del buffers
        self.remembered = remembered
        self.steps += 1
        factors = Factors.of(settings, self.steps, clip)
        with fatal(STEP_FAILED):
            for number, (name, total) in enumerate(zip(self.weights.working, totals, strict=True)):
                self._update(number, name, total, factors)
        self.accumulator.steps = self.steps
        self.bounds = bounds
        return {"grad_norm": grad_norm, "learning_rate": settings.lr}

    def _norm(self, totals: list[Tensor]) -> float:
        parts = [
            total.view(-1)[piece] for total in totals for piece, _ in _pieces(total.numel(), PIECE[self.device.type])
        ]
        return float(
            torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]).double().norm()
        )

    def _checked(self, totals: list[Tensor], grad_norm: float, clip: float, settings: AdamSettings) -> Bounds | None:
        """Return the bounds after a step, None if they must be measured then.

        Raises UserError if the step is not finite.
        """
        if self.bounds is None:
            scales = [[kept.scales[number] for kept in self.remembered.values()] for number in range(2)]
            self.bounds = Bounds.measured([leaf.detach() for leaf in self.weights.leaves()], *scales)
        after = self.bounds.after(grad_norm, settings)
        if after is None:
            require_finite_step(
                self.weights.named_tensors(), totals, self.moments(), settings, self.weights.dtype, clip
            )
        return after

    def _update(self, number: int, name: str, gradient: Tensor, factors: Factors) -> None:
        kept, leaf, masters = self.remembered[name], self.weights.working[name].detach().view(-1), self.weights.masters
        rests = masters.rests[name].view(-1) if isinstance(masters, SplitMasters) else None
        for index, (piece, width) in enumerate(_pieces(len(leaf), PIECE[self.device.type])):
            near = leaf[piece]
            rest = None if rests is None else rests[piece].to(self.device, non_blocking=True)
            master = (near if rest is None else join(near, rest)).view(-1, width)
            first, second = kept.read(piece, width, self.device)
            step_as_written(master, gradient.view(-1)[piece].view(-1, width), first, second, factors)
            for moment, values in enumerate((first, second)):
                kept.write(piece, moment, values, chances(values, self._seed_tensor(self.steps, number, index, moment)))
            if rests is not None:
                upper, rest = split(master.view(-1))
                near.copy_(upper)
                rests[piece].copy_(rest, non_blocking=True)

    def _seed_tensor(self, *numbers: int) -> Tensor:
        return torch.full((), _seed(*numbers), dtype=torch.int64, device=self.device)  # without a copy from the host

    def wait(self) -> None:
        """Wait until what steps have written to host memory is there."""
        if self.device.type == "cuda" and self.state == "compact-host":
            torch.cuda.synchronize(self.device)


class RoundingAccumulator(GradientAccumulator):
    """Sums of gradients in the precision of the base, laid out like `Weights.leaves` and rounded by chance."""

    def __init__(self, weights: FullWeights) -> None:
        super().__init__(weights)
        self.steps = 0
        """Steps of the model so far, of which chance is a function."""
        self.passes = 0
        """Passes whose gradients are in `totals`."""

    @property
    def gradients(self) -> list[Tensor] | None:
        return self.totals

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Return a function that adds the gradients of one pass, rounding by chance; it takes no memory."""
        if self.totals is None:
            pairs = zip(self.weights.leaves(), gradients, strict=True)
            return partial(self._begin_with, apart([torch.zeros_like(leaf) if g is None else g for leaf, g in pairs]))
        size = min(PIECE[self.totals[0].device.type], max(total.numel() for total in self.totals))
        reached = [
            (total.view(-1), g.reshape(-1)) for total, g in zip(self.totals, gradients, strict=True) if g is not None
        ]
        return partial(self._add, reached, _Sum(size, self.totals[0].device))

    def _begin_with(self, totals: list[Tensor]) -> None:
        self.totals, self.passes = totals, 1

    def _add(self, pairs: list[tuple[Tensor, Tensor]], buffers: "_Sum") -> None:
        self.passes += 1
        for number, (total, gradient) in enumerate(pairs):
            buffers.add(total, gradient, _seed(self.steps, self.passes, number))

    def begin_with_zeros(self) -> None:
        like = self.weights.leaves()
        self._begin_with(
            [torch.zeros_like(leaf, requires_grad=False, memory_format=torch.contiguous_format) for leaf in like]
        )

    def widen(self) -> None:
        """Do nothing: what has been accumulated stays in the precision of the base."""


class _Sum:
    """Adds flat gradients to totals of their precision; takes memory only when it is made."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.wide = torch.empty(size, dtype=torch.float32, device=device)
        self.random = torch.empty(size, dtype=torch.int32, device=device)
        self.generator = torch.Generator(device)

    def add(self, total: Tensor, gradient: Tensor, seed: int) -> None:
        if total.dtype == torch.float32:
            total.add_(gradient)
            return
        self.generator.manual_seed(seed)
        for some, more in zip(total.split(len(self.wide)), gradient.split(len(self.wide)), strict=True):
            wide, random = self.wide[: len(some)], self.random[: len(some)]
            wide.copy_(some).add_(more)
            # Random bits would turn some kinds of NaN into 0. Infinity stays infinity, and the step is refused.
            wide.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            # What is cut off below is an even share of the distance to the next number away from zero.
            wide.view(torch.int32).add_(random.random_(0, 2**16, generator=self.generator)).bitwise_and_(-(2**16))
            some.copy_(wide)


Optimizer = ModelOptimizer | CompactOptimizer
"""The optimizer of one model."""
