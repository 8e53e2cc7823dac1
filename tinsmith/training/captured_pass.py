"""CUDA graphs of small passes of one adapter: a GPU computes these faster than Python launches their kernels.

The layers of a decoder, forward and backward, are captured once for a number of tokens and replayed for every row that
fits into it. A graph reads and writes where its tensors lay when it was captured, so a row and the matrices of its
adapter are copied there first. Embedding, LM head and loss are computed as in any other pass.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import Stopwatch, upload
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory
from tinsmith.models.attention import PackedPlan, followed, varlen_attention
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.decoder import AttentionBlock, Decoder
from tinsmith.models.lora import Adapter, AdapterForm, Segment
from tinsmith.models.packed_lora import SegmentAdapters
from tinsmith.observing.metrics import WORKER_TIME

log = logging.getLogger(__name__)

TOKENS = (256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
"""Numbers of tokens of which there may be a graph. A longer pass takes the device longer than Python."""
SEQUENCES = (8, 64)
"""Numbers of sequences, likewise."""
PATIENCE = 2
"""Times that a graph is needed until it is captured."""
PAUSE = 256
"""Passes after which graphs are captured again when memory was short."""
MOST = 12
"""Most graphs that are kept. A dropped one is not captured again before it was needed `PAUSE` times more."""
MEMORY_SHARE = 0.1
"""Share of the device's memory that all graphs together may hold."""
APART = 1.1
"""Factor of time that graphs of several adapters may take more than one row: the first results come sooner."""
TOLERANCE = 0.02
"""Maximum distance of a graph's results from those without it, relative to their norm: the order of sums differs."""

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]
"""Returns what repeats a function, which reads and writes the same tensors every time."""


class PassKind(NamedTuple):
    """Key that tells graphs apart."""

    tokens: int
    sequences: int
    adapter: AdapterForm


class Frame:
    """Fixed tensors that graphs read rows from and write gradients to.

    Adapters of equal shapes share a frame, and are copied into its `adapter`.
    """

    def __init__(self, base: BaseModel, adapter: Adapter) -> None:
        tokens, hidden = TOKENS[-1], base.text_config.hidden_size
        # What it holds is overwritten
        self.adapter = replace(adapter, flat=adapter.flat_working.detach().clone(), ref=None)
        self.gradient = torch.zeros_like(self.adapter.flat_working)  # [parameter_count]
        self.embeddings = torch.zeros(tokens, hidden, dtype=base.dtype, device=base.device)
        self.d_hidden = torch.zeros_like(self.embeddings)  # [tokens, hidden]
        self.positions = torch.zeros(3 if base.family.mrope else 1, tokens, dtype=torch.int64, device=base.device)
        self.cu_seqlens = torch.zeros(SEQUENCES[-1] + 2, dtype=torch.int32, device=base.device)
        self.routes: Tensor | None = None
        if (mixture := base.layout.mixture) is not None:
            size = len(base.layout.experts), tokens, mixture.per_token
            self.routes = torch.full(size, -1, dtype=torch.int16, device=base.device)

    def take_routes(self, routes: Tensor | None) -> None:
        """Follow these experts of the first tokens of the row, and let the router choose the others."""
        if self.routes is not None:
            self.routes.fill_(-1)
            if routes is not None:
                self.routes[:, : routes.shape[1]].copy_(routes)


class PaddedPlan:
    """A `PackedPlan` for sequences whose number and lengths may change between replays."""

    def __init__(self, cu_seqlens: Tensor, tokens: int, routes: Tensor | None = None) -> None:
        """Take `cu_seqlens` [sequences + 2] int32: the last sequence fills the row, those before it may be empty.

        `routes` [mixtures, at least `tokens`, per_token] are as in `PackedPlan`.
        """
        self.cu_seqlens = cu_seqlens
        self.tokens = tokens
        self.routes = routes

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if query.is_cuda:
            return varlen_attention(query, key, value, self.cu_seqlens, self.tokens, scale, window, sinks)
        lengths = [length for length in self.cu_seqlens.diff().tolist() if length]
        return PackedPlan(lengths, query.device, query.dtype).attend(layer, query, key, value, scale, window, sinks)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError("gated delta nets are not captured")

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        raise NotImplementedError("gated delta nets are not captured")

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        return chosen if self.routes is None else followed(self.routes[mixture, : self.tokens], chosen)


@dataclass(eq=False)
class CapturedPass:
    """The layers of one pass, forward and backward."""

    kind: PassKind
    frame: Frame
    forward: Replay
    backward: Replay
    hidden: Tensor
    """[kind.tokens, hidden], written by `forward`."""
    reached: Sequence[bool]
    """Which leaves of the adapter get a gradient from the layers."""
    launched_s: float = 0.0
    """Seconds of the layers launch by launch."""
    seconds: float = 0.0
    """Seconds of a replay."""

    def replay_forward(self, embeddings: Tensor, row: PackedRow, adapter: Adapter) -> Tensor:
        """Copy the row and the adapter into the frame and compute: [tokens, hidden]."""
        frame, kind, tokens = self.frame, self.kind, len(embeddings)
        frame.adapter.flat_working.copy_(adapter.flat_working)
        frame.embeddings[:tokens].copy_(embeddings)
        frame.embeddings[tokens : kind.tokens].zero_()
        frame.positions[:, :tokens].copy_(row.positions)
        begins = np.cumsum(
            [0, *row.lengths, *[0] * (kind.sequences - len(row.lengths)), kind.tokens - tokens], dtype=np.int32
        )
        frame.cu_seqlens[: len(begins)].copy_(upload(begins, embeddings.device))
        frame.take_routes(row.routes)
        self.forward()
        return self.hidden[:tokens].clone()

    def replay_backward(self, d_hidden: Tensor) -> list[Tensor | None]:
        """Compute gradients of the adapter's leaves from that of the hidden states [tokens, hidden].

        The next pass overwrites them.
        """
        tokens = len(d_hidden)
        self.frame.d_hidden[:tokens].copy_(d_hidden)
        self.frame.d_hidden[tokens : self.kind.tokens].zero_()
        self.backward()
        found = self.frame.adapter.cut([self.frame.gradient])
        return [gradient if reached else None for gradient, reached in zip(found, self.reached, strict=True)]


class _Replayed(torch.autograd.Function):
    """Takes the embeddings, which need no gradient, and the leaves of the adapter."""

    @staticmethod
    def forward(
        ctx: Any, captured: CapturedPass, row: PackedRow, adapter: Adapter, embeddings: Tensor, *leaves: Tensor
    ) -> Tensor:
        ctx.captured = captured
        return captured.replay_forward(embeddings, row, adapter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.captured.replay_backward(grads[0])


class CapturedPasses:
    """The graphs of one base model."""

    def __init__(self, base: BaseModel, memory: PassMemory, logits_chunk: int, record: Recorder | None = None) -> None:
        """Record functions with `record`. The default, CUDA graphs, captures only on a GPU in half precision."""
        self.base = base
        self.memory = memory
        self.logits_chunk = logits_chunk
        self.pool: Any = None
        """Memory that all graphs share: only one runs at a time."""
        self.held = 0
        """Bytes of it, which no other pass can use."""
        self.passes: OrderedDict[PassKind, CapturedPass] = OrderedDict()
        """The last one used last."""
        self.frames: dict[AdapterForm, Frame] = {}
        self.seen = Counter[PassKind]()
        self.paused = 0
        """Passes that are not captured, because others needed the memory."""
        self.record = record or self._capture
        on_gpu = base.device.type == "cuda" and base.dtype in (torch.bfloat16, torch.float16)
        self.possible = (on_gpu or record is not None) and not base.deterministic and _can_be_captured(base.decoder)

    def hidden_states(self, row: PackedRow) -> Tensor | None:
        """Compute final hidden states [tokens, hidden], differentiable in the adapter's leaves; None if no graph."""
        found = self._find(row)
        if found is None:
            return None
        adapter = row.segments[0].adapter
        assert adapter is not None
        embeddings = self.base.language_model.get_input_embeddings()(row.token_ids)
        compute: Any = _Replayed.apply
        hidden: Tensor = compute(found, row, adapter, embeddings, *adapter.leaves())
        return hidden

    def _find(self, row: PackedRow) -> CapturedPass | None:
        """Return the graph for a row, captured now if it is time."""
        if row.full is not None or row.images or len(row.segments) != 1:
            return None
        adapter = row.segments[0].adapter
        kind = self._kind(row.lengths, adapter)
        if kind is None or adapter is None:
            return None
        if found := self.passes.get(kind):
            self.passes.move_to_end(kind)
            return found
        self.seen[kind] += 1
        if self.paused:
            self.paused -= 1
            return None
        if self.seen[kind] < PATIENCE or not self._make_room(kind.tokens):
            return None
        return self._make(kind, adapter)

    def _kind(self, lengths: Sequence[int], adapter: Adapter | None) -> PassKind | None:
        """Return the key of the graph for text of these lengths; None if it cannot be captured."""
        tokens = next((size for size in TOKENS if size >= sum(lengths)), None)
        sequences = next((size for size in SEQUENCES if size >= len(lengths)), None)
        if not self.possible or adapter is None or tokens is None or sequences is None:
            return None
        return PassKind(tokens, sequences, adapter.form)

    def are_faster_apart(self, rows: Sequence[tuple[Sequence[int], Adapter]]) -> bool:
        """Whether several adapters' texts, as (lengths, adapter), take less time by a graph each than in one row."""
        kinds = [self._kind(*row) for row in rows]
        if self.paused:
            self.paused -= 1
        if any(
            kind is None or (kind not in self.passes and (self.paused or not self._has_room(kind.tokens)))
            for kind in kinds
        ):
            return False
        missing = {kind for kind in kinds if kind is not None and kind not in self.passes}
        if missing:
            self.seen.update(missing)
            return all(self.seen[kind] >= PATIENCE for kind in missing)
        graphs = [self.passes[kind] for kind in kinds if kind is not None]
        together = max(graph.launched_s for graph in graphs)
        if self.base.layout.mixture is None:  # experts are read once a pass: more tokens take less time each
            per_token = min(graph.seconds / graph.kind.tokens for graph in graphs)
            together = max(together, per_token * sum(sum(lengths) for lengths, _ in rows))
        return sum(graph.seconds for graph in graphs) <= APART * together

    def may_have(self, tokens: int) -> bool:
        """Whether there may be a graph for a pass of so many tokens."""
        return self.possible and tokens <= TOKENS[-1]

    def give_way(self) -> bool:
        """Free the memory of all graphs for a while. Returns whether there were any."""
        if not self.passes:
            return False
        log.info("%d graphs of small passes give their %.1f GiB to what needs it", len(self.passes), self.held / 2**30)
        self._drop()
        self.paused = PAUSE
        return True

    def _drop(self) -> None:
        self.passes.clear()
        self.frames.clear()
        self.seen.clear()
        self.pool, self.held = None, 0

    def _has_room(self, tokens: int) -> bool:
        """Whether a graph of so many tokens can be captured, perhaps in the place of others."""
        return self._is_within_another(tokens) or self._needed(tokens) <= self._most()

    def _make_room(self, tokens: int) -> bool:
        """Whether a graph can be captured; graphs of fewer tokens are dropped if there is not room for both."""
        if self._is_within_another(tokens):
            return True
        needed, most = self._needed(tokens), self._most()
        if self.held + needed > most:
            self._drop()  # what smaller graphs hold may lie in pieces that are too small
        return needed <= most

    def _is_within_another(self, tokens: int) -> bool:
        """Whether the pass finds what it needs in the memory of a longer one."""
        return self.base.device.type != "cuda" or tokens <= max((kind.tokens for kind in self.passes), default=0)

    def _needed(self, tokens: int) -> int:
        return self.memory.bytes(tokens, self.logits_chunk, KEEP_ALL)

    def _most(self) -> float:
        """Bytes that all graphs may hold now."""
        free, total = torch.cuda.mem_get_info(self.base.device)
        reserved, allocated = (
            torch.cuda.memory_reserved(self.base.device),
            torch.cuda.memory_allocated(self.base.device),
        )
        return min(MEMORY_SHARE * total, (free + reserved - allocated - self.held) / 2)

    def _make(self, kind: PassKind, adapter: Adapter) -> CapturedPass | None:
        """Capture a graph and try it out; None if that fails. It is tried again later if only memory was short."""
        try:
            if kind.adapter not in self.frames:
                self.frames[kind.adapter] = Frame(self.base, adapter)
            assert self.base.decoder is not None
            with WORKER_TIME.during("compiling"):
                made = _captured(self.base.decoder, kind, self.frames[kind.adapter], adapter, self.record)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            log.warning("passes of %d tokens run without a CUDA graph, which is slower: %s", kind.tokens, reason)
            self._drop()
            self.possible, self.paused = isinstance(error, torch.OutOfMemoryError), PAUSE
            if self.base.device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        self.passes[kind] = made
        while len(self.passes) > MOST:
            former, _ = self.passes.popitem(last=False)
            self.seen[former] = -PAUSE
        log.info(
            "captured passes of up to %d tokens and %d sequences; all graphs hold %.1f GiB",
            *kind[:2],
            self.held / 2**30,
        )
        return made

    def _capture(self, function: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(self.base.device)
            function()
            self.held += torch.cuda.memory_reserved(self.base.device) - before
        return graph.replay


def _captured(decoder: Decoder, kind: PassKind, frame: Frame, adapter: Adapter, record: Recorder) -> CapturedPass:
    """Capture a pass. Raises RuntimeError if it computes something else than it did before the capture."""
    tokens, leaves, device = kind.tokens, frame.adapter.leaves(), frame.embeddings.device
    frame.cu_seqlens[1 : kind.sequences + 2].fill_(tokens)
    plan = PaddedPlan(frame.cu_seqlens[: kind.sequences + 2], tokens, frame.routes)
    segments = [Segment(0, tokens, frame.adapter)]
    made = CapturedPass(kind, frame, _nothing, _nothing, frame.embeddings, ())
    graph_of: list[Tensor] = []

    def forward() -> None:
        with torch.enable_grad():
            out = decoder.forward(
                frame.embeddings[:tokens], frame.positions[:, :tokens], plan, SegmentAdapters(segments)
            )
        graph_of[:] = [out]
        made.hidden = out.detach()

    def backward() -> None:
        with torch.autograd.set_multithreading_enabled(False):  # in the thread that captures
            found = torch.autograd.grad(graph_of, leaves, [frame.d_hidden[:tokens]], allow_unused=True)
        graph_of.clear()
        made.reached = [gradient is not None for gradient in found]
        (joined,) = frame.adapter.joined(found)
        frame.gradient.copy_(joined)

    # The device's own generator may refuse after a capture that failed: torch leaves it as if one were running.
    random = torch.Generator(device).manual_seed(0)
    for drawn in (frame.embeddings, frame.d_hidden):
        drawn[:tokens].normal_(std=0.02, generator=random)
    frame.adapter.flat_working.copy_(adapter.flat_working)
    # Kernels are compiled and chosen outside of the capture
    made.launched_s = min(_seconds(device, forward, backward) for _ in range(2))
    expected = made.hidden.clone(), frame.gradient.clone()
    made.forward = record(forward)
    made.backward = record(backward)
    made.hidden.zero_()
    frame.gradient.zero_()
    # The first one loads the graph, too
    made.seconds = min(_seconds(device, made.forward, made.backward) for _ in range(2))
    for found, wanted in zip((made.hidden, frame.gradient), expected, strict=True):
        error, norm = float((found.float() - wanted.float()).norm()), float(wanted.float().norm())
        if not error <= TOLERANCE * norm:
            raise RuntimeError(f"the graph computes something else: an error of {error:.3g} beside {norm:.3g}")
    return made


def _seconds(device: torch.device, forward: Callable[[], None], backward: Callable[[], None]) -> float:
    """Measure the seconds of a pass on the device, launches included."""
    watch = Stopwatch(device)
    forward()
    backward()
    watch.stop()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = watch.seconds
    assert seconds is not None
    return seconds


def _can_be_captured(decoder: Decoder | None) -> bool:
    """Whether its layers stay in place and none is a gated delta net.

    The kernels of gated delta nets are launched for lengths known to Python.
    """
    return (
        decoder is not None
        and type(decoder) is Decoder
        and all(isinstance(layer.block, AttentionBlock) for layer in decoder.layers)
    )


def _nothing() -> None:
    """Do nothing; stands for a graph before one is captured."""
