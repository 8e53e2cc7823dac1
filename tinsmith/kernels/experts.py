"""Triton kernels of a mixture of experts in a decoding step (`models/batched_lora.py`): each weight is read once.

A step has few rows, and each expert few of them: its time is that of reading the experts' weights. So programs are
tiles of an expert's outputs, which compute all its pairs of a row and an expert while their weights are at hand. Pairs
are in the order of their experts; within one, in that of the rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping
from tinsmith.kernels.lora import CHUNK, columns_of, expand, reduce
from tinsmith.kernels.quantized import of_e4m3, scale_of

FEWEST_PAIRS, MOST_PAIRS = 16, 64
"""Pairs that a program computes at a time: a product on tensor cores has 16 rows or more."""
UP_OUTPUTS, DOWN_OUTPUTS = 32, 64
"""Outputs of a program: of gate and of up each; of down."""
STEP = 128
"""Inputs that a program multiplies at a time."""
COLUMNS = 512
"""Numbers of a row that a program adds up."""


class RowMatrices(NamedTuple):
    """The matrices of the adapters of a step for one mixture of experts; each row has its own columns of them."""

    columns: Tensor
    """[rows, 2]: the columns [start, end) of each row; none for the base."""
    a: Tensor
    """[2, columns, hidden] of gate and up"""
    b: Tensor
    """[experts, 2 · width, columns] of gate and up, one below the other"""
    inner: Tensor
    """[experts, columns, width]: the A's of down"""
    outer: Tensor
    """[hidden, columns]: the B of down"""
    tiles: Tensor
    """Those of `outer`, from `output_tiles`."""
    widest: int
    """Outputs of a tile, at most."""
    alpha: float
    """An adapter's scale times its rank."""


class CodedMatrices(NamedTuple):
    """Quantized matrices of experts, as `models/quantized.py` has them."""

    codes: Tensor
    """[experts, out, bytes of a row] uint8"""
    scales: Tensor
    """[experts, out, groups]"""
    table: Tensor
    """[16] float32: what codes stand for; empty for e4m3."""
    group: int
    """Numbers of a row that share a scale; 0 for the whole row."""

    @property
    def form(self) -> dict[str, Any]:
        """What a kernel has to know of them."""
        exponents = self.scales.element_size() == 1
        return {"CODED": "table" if len(self.table) else "e4m3", "EXPONENTS": exponents, "GROUP": self.group or 1}


def _as_coded(matrices: Tensor | CodedMatrices) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The tensors of matrices for a kernel, and what it has to know of them: two are never read of a plain one."""
    if isinstance(matrices, CodedMatrices):
        return matrices[:3], matrices.form
    return (matrices, matrices, matrices), {"CODED": "", "EXPONENTS": False, "GROUP": 1}


def choose(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Each row's experts with the greatest softmax of logits [rows, experts], the first of equal ones, and its values.

    Both are [rows, per_token]: weights like the logits, which add up to 1 if `normalized`, and int64.
    """
    rows, experts = logits.shape
    logits = logits.contiguous()
    weights = torch.empty(rows, per_token, dtype=logits.dtype, device=logits.device)
    chosen = torch.empty(rows, per_token, dtype=torch.int64, device=logits.device)
    launch: Any = _choose
    launch[(rows,)](
        *(logits, weights, chosen),
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        PER_TOKEN=per_token,
        KEPT=triton.next_power_of_2(per_token),
        NORMALIZED=normalized,
        num_warps=1,
        **overlapping(logits.device, rows),
    )
    return weights, chosen


def mix(
    h: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor | CodedMatrices,
    down: Tensor | CodedMatrices,
    own: RowMatrices | None,
) -> Tensor:
    """Compute the experts of rows h [rows, hidden], with the rows' adapters if there are some: [rows, hidden].

    `weights` and `chosen` [rows, per_token] are the router's; gate_up [experts, 2 · width, hidden] and down [experts,
    hidden, width] the experts', plain or coded. Nothing is read on the host.
    """
    rows, hidden = h.shape
    (of_gate_up, gate_up_form), (of_down, down_form) = _as_coded(gate_up), _as_coded(down)
    experts, width = len(of_gate_up[0]), of_gate_up[0].shape[1] // 2
    per_token = chosen.shape[1]
    h, chosen = h.contiguous(), chosen.contiguous()
    overlaps = overlapping(h.device, rows)
    order = torch.empty(rows * per_token, dtype=torch.int32, device=h.device)
    ends = torch.empty(experts, dtype=torch.int32, device=h.device)
    launch: Any = _sort
    launch[(experts,)](
        chosen, order, ends, len(order), PADDED=triton.next_power_of_2(len(order)), num_warps=4, **overlaps
    )
    columns, reduced = 0, h
    if own is not None:
        columns, reduced = own.a.shape[1], reduce(h, own.columns, own.a)
    # Without adapters the arguments that stand for theirs are never read.
    some = own or RowMatrices(order, h, h, h, h, h, 0, 0.0)
    pairs = triton.next_power_of_2(triton.cdiv(2 * len(order), experts))
    sizes = {
        "PER_TOKEN": per_token,
        "PAIRS": min(MOST_PAIRS, max(FEWEST_PAIRS, pairs)),
        "COLUMNS": columns,
        "STEP": STEP,
        **overlaps,
    }
    activated = torch.empty(len(order), width, dtype=h.dtype, device=h.device)
    launch = _activate
    launch[(experts, triton.cdiv(width, UP_OUTPUTS))](
        *(h, *of_gate_up, order, ends, some.columns, reduced, some.b, activated, rows, some.columns.stride(0), width),
        **sizes,
        **gate_up_form,
        HIDDEN=hidden,
        OUTPUTS=UP_OUTPUTS,
        CHUNK=CHUNK,
        SPLITS=len(reduced) if columns else 0,
        ALPHA=some.alpha,
        num_warps=4,
        num_stages=3 if sizes["PAIRS"] == FEWEST_PAIRS else 2,  # in 100 KiB, which every card has
    )
    of_pairs = torch.empty(rows, per_token, hidden, dtype=torch.float32, device=h.device)
    inside = torch.empty(per_token, rows, columns, dtype=torch.float32, device=h.device)
    tiles = triton.cdiv(hidden, DOWN_OUTPUTS)
    launch = _down
    launch[(experts, tiles + triton.cdiv(columns, DOWN_OUTPUTS))](
        *(activated, *of_down, some.inner, order, ends, weights.contiguous(), of_pairs, inside, rows, hidden, tiles),
        **sizes,
        **down_form,
        WIDTH=width,
        OUTPUTS=DOWN_OUTPUTS,
        num_warps=4,
        num_stages=3 if sizes["PAIRS"] == FEWEST_PAIRS else 2,
    )
    out = torch.empty_like(h)
    launch = _sum
    launch[(rows, triton.cdiv(hidden, COLUMNS))](
        of_pairs, out, hidden, PER_TOKEN=per_token, COLUMNS=COLUMNS, num_warps=4, **overlaps
    )
    if own is not None:
        expand(out, own.columns, own.outer, inside, own.tiles, 1, own.widest, own.alpha)
    return out


@triton.jit
def _choose(
    logits: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    KEPT: tl.constexpr,
    NORMALIZED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The experts of one row: the greatest, then the greatest of the others."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    logit = tl.load(logits + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    powers = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(powers, 0)
    left = tl.where(expert < EXPERTS, powers / total, -1.0)
    place = tl.arange(0, KEPT)
    found = tl.zeros([KEPT], tl.float32)
    numbers = tl.zeros([KEPT], tl.int64)
    for number in tl.static_range(PER_TOKEN):
        greatest = tl.max(left, 0)
        # Of NaN none is the greatest: then it is the last expert, which exists.
        first = tl.minimum(tl.min(tl.where(left == greatest, expert, EXPERTS), 0), EXPERTS - 1)
        found = tl.where(place == number, greatest, found)
        numbers = tl.where(place == number, first.to(tl.int64), numbers)
        left = tl.where(expert == first, -1.0, left)
    if NORMALIZED:
        found = found / tl.sum(found, 0)
    found = tl.where(total == total, found, total)  # NaN if any is
    to = row * PER_TOKEN + place
    tl.store(weights + to, found.to(weights.dtype.element_ty), mask=place < PER_TOKEN)
    tl.store(chosen + to, numbers, mask=place < PER_TOKEN)


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    pairs: tl.tensor,
    PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The pairs of one expert, in the order of the rows, behind those of the experts before it."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    pair = tl.arange(0, PADDED)
    of_pair = tl.load(chosen + pair, mask=pair < pairs, other=2**30).to(tl.int32)
    own = (of_pair == expert).to(tl.int32)
    before = tl.sum((of_pair < expert).to(tl.int32), 0)
    tl.store(order + before + tl.cumsum(own, 0) - 1, pair, mask=own > 0)
    tl.store(ends + expert, before + tl.sum(own, 0))


@triton.jit
def _pairs_of(ends: tl.tensor, expert: tl.tensor) -> tl.tuple:
    """The pairs [start, end) of an expert."""
    return tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)


@triton.jit
def _numbers(
    matrix: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    row: tl.tensor,
    begin: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    CODED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Numbers of rows [rows, 1] of all experts' matrices, those that exist [rows], in `STEP` columns from `begin`."""
    column = begin + tl.arange(0, STEP)[None, :]
    inside = exists[:, None] & (column < COLUMNS)
    if CODED == "":
        numbers = tl.load(matrix + row * COLUMNS + column, mask=inside, other=0.0)
    elif CODED == "e4m3":
        code = tl.load(matrix + row * COLUMNS + column, mask=inside, other=0)
        numbers = (of_e4m3(code) * scale_of(scales, row, exists[:, None], EXPONENTS)).to(dtype)
    else:
        byte = begin // 2 + tl.arange(0, STEP // 2)[None, :]
        code = tl.load(matrix + row * (COLUMNS // 2) + byte, mask=exists[:, None] & (byte < COLUMNS // 2), other=0)
        group, groups = begin // GROUP + tl.arange(0, STEP // GROUP)[None, :], tl.cdiv(COLUMNS, GROUP)
        scale = scale_of(scales, row * groups + group, exists[:, None] & (group < groups), EXPONENTS)
        of_bytes = tl.broadcast_to(scale[:, :, None], [row.shape[0], STEP // GROUP, GROUP // 2])
        scale = tl.reshape(of_bytes, [row.shape[0], STEP // 2])
        low, high = tl.load(table + (code & 15)) * scale, tl.load(table + (code >> 4)) * scale
        numbers = tl.interleave(low, high).to(dtype)
    return numbers


@triton.jit(do_not_specialize=["rows"])
def _activate(
    h: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    columns: tl.tensor,
    reduced: tl.tensor,
    b: tl.tensor,
    activated: tl.tensor,
    rows: tl.tensor,
    columns_stride: tl.tensor,
    width: tl.tensor,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALPHA: tl.constexpr,
    CODED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some outputs of silu(gate) · up of all pairs of an expert."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0).to(tl.int64)
    start, end = _pairs_of(ends, expert)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < width
    gate_row = (expert * 2 * width + output)[:, None]
    dtype = activated.dtype.element_ty
    for first in range(start, end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        inside = pair < end
        token = tl.load(order + pair, mask=inside, other=0) // PER_TOKEN
        gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for place in range(0, HIDDEN, STEP):
            number = place + tl.arange(0, STEP)
            read = (number < HIDDEN)[None, :]
            x = tl.load(h + token[:, None] * HIDDEN + number[None, :], mask=inside[:, None] & read, other=0.0)
            gate_weight = _numbers(
                gate_up, scales, table, gate_row, place, exists, dtype, HIDDEN, STEP, CODED, EXPONENTS, GROUP
            )
            up_weight = _numbers(
                gate_up, scales, table, gate_row + width, place, exists, dtype, HIDDEN, STEP, CODED, EXPONENTS, GROUP
            )
            gate = tl.dot(x, gate_weight.T, gate)
            up = tl.dot(x, up_weight.T, up)
        if COLUMNS > 0:
            mine, behind, lowest, highest = columns_of(columns, token, inside, columns_stride)
            scale = (ALPHA / tl.maximum(behind - mine, 1).to(tl.float32))[:, None]
            for place in range(lowest // CHUNK * CHUNK, highest, CHUNK):
                column = place + tl.arange(0, CHUNK)
                own = (column[None, :] >= mine[:, None]) & (column[None, :] < behind[:, None])
                u_gate = tl.zeros([PAIRS, CHUNK], tl.float32)
                u_up = tl.zeros([PAIRS, CHUNK], tl.float32)
                for split in tl.static_range(SPLITS):
                    where = (split * rows + token[:, None]) * (2 * COLUMNS) + column[None, :]
                    u_gate += tl.load(reduced + where, mask=own, other=0.0)
                    u_up += tl.load(reduced + where + COLUMNS, mask=own, other=0.0)
                b_gate = tl.load(b + gate_row * COLUMNS + column[None, :], mask=exists[:, None], other=0.0)
                b_up = tl.load(b + (gate_row + width) * COLUMNS + column[None, :], mask=exists[:, None], other=0.0)
                gate = tl.dot((u_gate * scale).to(dtype), b_gate.T, gate)
                up = tl.dot((u_up * scale).to(dtype), b_up.T, up)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        found = (gate * tl.sigmoid(gate) * up).to(dtype)
        tl.store(activated + pair[:, None] * width + output[None, :], found, mask=inside[:, None] & exists[None, :])


@triton.jit
def _multiplied(
    activated: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    weights: tl.tensor,
    pair: tl.tensor,
    inside: tl.tensor,
    place: tl.tensor,
    output: tl.tensor,
    exists: tl.tensor,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    CODED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Pairs times rows of all experts' matrices [outputs, WIDTH], and times the weight of each pair."""
    total = tl.zeros([pair.shape[0], output.shape[0]], tl.float32)
    dtype = activated.dtype.element_ty
    for begin in range(0, WIDTH, STEP):
        number = begin + tl.arange(0, STEP)
        read = (number < WIDTH)[None, :]
        x = tl.load(activated + pair[:, None] * WIDTH + number[None, :], mask=inside[:, None] & read, other=0.0)
        weight = _numbers(
            matrix, scales, table, output[:, None], begin, exists, dtype, WIDTH, STEP, CODED, EXPONENTS, GROUP
        )
        total = tl.dot(x, weight.T, total)
    return total * tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _down(
    activated: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    inner: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    weights: tl.tensor,
    of_pairs: tl.tensor,
    reduced: tl.tensor,
    rows: tl.tensor,
    hidden: tl.tensor,
    down_tiles: tl.tensor,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some outputs of down, or some columns of its A's, of all pairs of an expert, times the pairs' weights."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    start, end = _pairs_of(ends, expert)
    for first in range(start, end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        inside = pair < end
        place = tl.load(order + pair, mask=inside, other=0)
        if tile < down_tiles:
            output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
            exists = output < hidden
            own = expert * hidden + output
            total = _multiplied(
                activated,
                down,
                scales,
                table,
                weights,
                pair,
                inside,
                place,
                own,
                exists,
                WIDTH,
                STEP,
                CODED,
                EXPONENTS,
                GROUP,
            )
            to = place[:, None].to(tl.int64) * hidden
            tl.store(of_pairs + to + output[None, :], total, mask=inside[:, None] & exists[None, :])
        elif COLUMNS > 0:
            output = (tile - down_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
            exists = output < COLUMNS
            own = expert * COLUMNS + output
            total = _multiplied(
                activated,
                inner,
                inner,
                inner,
                weights,
                pair,
                inside,
                place,
                own,
                exists,
                WIDTH,
                STEP,
                "",
                False,
                1,
            )
            to = (place % PER_TOKEN * rows + place // PER_TOKEN)[:, None].to(tl.int64) * COLUMNS
            tl.store(reduced + to + output[None, :], total, mask=inside[:, None] & exists[None, :])


@triton.jit
def _sum(
    of_pairs: tl.tensor,
    out: tl.tensor,
    hidden: tl.tensor,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some numbers of the sum of a row's pairs."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(PER_TOKEN):
        place = (row * PER_TOKEN + number) * hidden + column
        total += tl.load(of_pairs + place, mask=column < hidden, other=0.0)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
