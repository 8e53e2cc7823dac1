"""The frozen vision tower over packed images: all patches in one row, with no loop over images or wait for the device.

transformers' towers attend image by image, or window by window, and read the sizes of images back from the device. Here
sizes stay on the host, and what follows from the size alone is cached. The weights are those of transformers' modules,
and the self-check compares both.

Qwen3-VL and Qwen3.5 add learned position embeddings, and Qwen3-VL gives features of several layers. In Qwen2.5-VL most
layers attend within windows, so its patches are laid window by window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import half_on_gpu
from tinsmith.models.attention import flash_attention
from tinsmith.models.fused import add_layer_norm, add_rms_norm, rotate

# An image on its way into a model: colour values of its patches, what the vision tower takes, and what the tower makes
# of it.


class PixelLevels:
    """Table of the values that a model's image processor computes from the 256 values of a colour channel, to the bit.

    So images are kept and copied to the device as bytes: an eighth of the float32 values, which repeat an image for
    each frame of a patch.
    """

    def __init__(self, table: Tensor, frames: int) -> None:
        """`table` [channels, 256] float32; a patch spans `frames` frames, in all of which a still image is the same."""
        self.table = table
        self.frames = frames
        self._on_device: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def values(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """The processor's values of `pixels`, on their device: [patches, channels * frames * area].

        `pixels` [patches, channels * area] uint8.
        """
        table, offsets = self._tables(pixels.device, dtype)
        places = pixels.view(len(pixels), len(self.table), -1) + offsets  # [patches, channels, area] int32
        # [patches, channels, 1, area]
        values = table.index_select(0, places.flatten()).view(len(pixels), len(self.table), 1, -1)
        return values.expand(-1, -1, self.frames, -1).reshape(len(pixels), -1)

    def _tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The table in one row, and where each channel begins in it: [channels * 256] and [channels, 1]."""
        key = device, dtype
        if key not in self._on_device:
            starts = torch.arange(len(self.table), dtype=torch.int32).unsqueeze(1) * 256
            self._on_device[key] = self.table.flatten().to(device, dtype), starts.to(device)
        return self._on_device[key]


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image, resized and cut into patches."""

    sha256: bytes
    pixels: Tensor
    """[patches, channels * area] uint8, on the CPU. Patches that are merged into one image token are neighbours."""
    levels: PixelLevels
    grid_thw: tuple[int, int, int]
    """Frames, rows and columns of patches."""
    rows: slice
    """Its image tokens that lie in the sequence, which may be a part of one."""

    @property
    def pixel_values(self) -> Tensor:
        """Compute what the model's own processor returns: [patches, patch_dim] float32, on the CPU."""
        return self.levels.values(self.pixels, torch.float32)

    @property
    def pixel_values_nbytes(self) -> int:
        """Memory that `pixel_values` takes, in bytes."""
        return self.pixels.numel() * self.levels.frames * torch.float32.itemsize

    def image_tokens(self, merge_size: int) -> int:
        """Tokens of the whole image, where `merge_size` patches along each side become one."""
        return math.prod(self.grid_thw) // merge_size**2


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of one image, computed by the frozen vision tower."""

    embeddings: Tensor
    """[image tokens, hidden]"""
    deepstack: tuple[Tensor, ...]
    """Features for the first language layers (Qwen3-VL), each [image tokens, hidden]; empty for other families."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.nbytes for t in (self.embeddings, *self.deepstack))

    def part(self, rows: slice) -> "ImageFeatures":
        """Those of some of its image tokens."""
        return ImageFeatures(self.embeddings[rows], tuple(layer[rows] for layer in self.deepstack))


# The tower that makes these features.

PATCHES_AT_ONCE = 2**14
"""Patches of one call, which bounds its memory; a single image may have more."""

GRID_BYTES = 2**26
"""Memory on the device for what follows from the sizes of images."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of the patches of an image."""


@dataclass(frozen=True, eq=False)
class GridTables:
    """Tables that depend only on the size of an image."""

    cos: Tensor
    """[patches, pairs] float32, of the rotations of queries and keys."""
    sin: Tensor
    embedding: Tensor | None
    """[patches, hidden]: the learned position embeddings, resampled to the image's size, if the tower has them."""
    order: NDArray[np.int64]
    """[image tokens]: the merged patches window by window."""
    windows: list[int]
    """Patches of each window."""

    @property
    def nbytes(self) -> int:
        """Memory on the device, in bytes."""
        return sum(tensor.nbytes for tensor in (self.cos, self.sin, self.embedding) if tensor is not None)


class Spans:
    """Patches that attend to each other: neighbours in the row, a frame or a window of one image."""

    def __init__(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.longest = max(lengths)
        self.cu_seqlens: Tensor | None = None
        """[spans + 1] int32 on the device, where the variable-length kernel computes."""
        self.groups: list[tuple[int, Tensor | None]] = []
        """Elsewhere: each length, and the rows of its spans [spans * length]; None for all rows."""
        ends = np.cumsum(lengths)
        if half_on_gpu(device, dtype):
            self.cu_seqlens = upload(np.concatenate([[0], ends]).astype(np.int32), device)
        elif len(set(lengths)) == 1:
            self.groups = [(lengths[0], None)]
        else:
            sizes = np.repeat(lengths, lengths)  # [patches]: the length of each patch's span
            self.groups = [(length, upload(np.flatnonzero(sizes == length), device)) for length in sorted(set(lengths))]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention within each span, in both directions: all [patches, heads, head_dim]."""
        if self.cu_seqlens is not None:
            bounds, longest = self.cu_seqlens, self.longest
            return flash_attention(query, key, value, bounds, bounds, (longest, longest), scale, causal=False)
        if self.groups[0][1] is None:
            return _attend_equal(self.groups[0][0], query, key, value, scale)
        mixed = torch.empty_like(query)
        for length, rows in self.groups:
            assert rows is not None
            q, k, v = (x.index_select(0, rows) for x in (query, key, value))
            mixed.index_copy_(0, rows, _attend_equal(length, q, k, v, scale))
        return mixed


def _attend_equal(length: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`Spans.attend` of spans that all have this length."""
    # [patches, heads, head_dim] -> [spans, heads, length, head_dim]
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


class VisionTower:
    """The frozen tower of one model. `visual` is transformers' module, whose weights it computes with."""

    def __init__(self, visual: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.visual = visual
        self.device = device
        self.dtype = dtype
        self.merge: int = visual.spatial_merge_size
        self.deepstack: list[int] = list(getattr(visual, "deepstack_visual_indexes", []))
        """Layers that give features for the first language layers too."""
        self.full: set[int] | None = (
            set(visual.fullatt_block_indexes) if hasattr(visual, "fullatt_block_indexes") else None
        )
        """Layers that attend to the whole image, the others within windows; None if all do."""
        self.window: int = visual.window_size // visual.patch_size // self.merge if self.full is not None else 0
        """Merged patches along each side of a window."""
        self.grids: LRUCache[Grid, GridTables] = LRUCache(GRID_BYTES, getsizeof=lambda tables: tables.nbytes)

    @torch.no_grad()
    def features(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        """Features of each image, in order."""
        return [features for part in _parts(images) for features in self._features(part)]

    def _features(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        tables = [self._tables(image.grid_thw) for image in images]
        embeddings, *deepstack = self._walk(self._embed(images), [image.grid_thw for image in images], tables)
        counts = [image.image_tokens(self.merge) for image in images]
        layers = [layer.split(counts) for layer in deepstack]
        return [
            # Copies, so that a batch can be freed
            ImageFeatures(own.clone(), tuple(layer[i].clone() for layer in layers))
            for i, own in enumerate(embeddings.split(counts))
        ]

    def _embed(self, images: Sequence[ImageInput]) -> Tensor:
        """Pixels -> [patches, hidden]. A convolution over whole patches is a matrix multiplication."""
        values = []
        for levels, group in groupby(images, key=lambda image: image.levels):
            pixels = [image.pixels for image in group]
            counts = [len(own) for own in pixels]
            row = torch.empty(sum(counts), pixels[0].shape[1], dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            for place, own in zip(row.split(counts), pixels, strict=True):
                # PyTorch would wake a thread on each core for so small a copy, and wait 8 ms for them on a GPU's host
                # of 16 cores.
                np.copyto(place.numpy(), own.numpy())
            values.append(levels.values(row.to(self.device, non_blocking=True), self.dtype))
        patches = values[0] if len(values) == 1 else torch.cat(values)  # [patches, patch_dim]
        projection = self.visual.patch_embed.proj
        return linear(patches, projection.weight.flatten(1), projection.bias)

    def _walk(self, hidden: Tensor, grids: Sequence[Grid], tables: Sequence[GridTables]) -> list[Tensor]:
        """Embedded patches [patches, hidden] -> merged features [image tokens, out], then those of deepstack layers."""
        if tables[0].embedding is not None:
            hidden = hidden + torch.cat([table.embedding for table in tables if table.embedding is not None])
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        spans = windows = Spans(frames, self.device, self.dtype)
        order: Tensor | None = None
        if self.full is not None:
            order = self._window_order(tables)
            hidden = hidden.unflatten(0, (-1, self.merge**2)).index_select(0, order).flatten(0, 1)
            windows = Spans([length for table in tables for length in table.windows], self.device, self.dtype)
        cos, sin = (torch.cat(parts) for parts in zip(*((table.cos, table.sin) for table in tables), strict=True))
        deepstack = []
        delta: Tensor | None = None
        for index, block in enumerate(self.visual.blocks):
            hidden, normed = _add_norm(block.norm1, hidden, delta)
            attended = _attention(
                block.attn, normed, cos, sin, spans if self.full is None or index in self.full else windows
            )
            hidden, normed = _add_norm(block.norm2, hidden, attended)
            delta = block.mlp(normed)
            if index in self.deepstack:
                deepstack.append(self.visual.deepstack_merger_list[self.deepstack.index(index)](hidden + delta))
        assert delta is not None, "a tower has layers"
        merged: Tensor = self.visual.merger(hidden + delta)
        if order is not None:
            merged = torch.empty_like(merged).index_copy_(0, order, merged)
        return [merged, *deepstack]

    def _window_order(self, tables: Sequence[GridTables]) -> Tensor:
        """[image tokens]: the merged patches of all images window by window."""
        starts = np.cumsum([0, *(len(table.order) for table in tables)])
        return upload(
            np.concatenate([table.order + start for table, start in zip(tables, starts[:-1], strict=True)]), self.device
        )

    def _tables(self, grid: Grid) -> GridTables:
        if (tables := self.grids.get(grid)) is None:
            tables = self._make_tables(grid)
            if tables.nbytes <= self.grids.maxsize:
                self.grids[grid] = tables
        return tables

    def _make_tables(self, grid: Grid) -> GridTables:
        order, windows = (
            window_order(grid, self.merge, self.window) if self.full is not None else (np.empty(0, np.int64), [])
        )
        rows, columns = patch_places(grid, self.merge)  # [patches] each
        embedding = self._position_embedding(grid, rows, columns) if hasattr(self.visual, "pos_embed") else None
        places = np.stack([rows, columns], axis=1)  # [patches, 2]
        if self.full is not None:
            places = places.reshape(-1, self.merge**2, 2)[order].reshape(-1, 2)
        rotary = self.visual.rotary_pos_emb
        angles = upload(places, self.device).float().unsqueeze(-1) * rotary.inv_freq.float()  # [patches, 2, pairs / 2]
        cos, sin = (turn(angles).flatten(1) * rotary.attention_scaling for turn in (torch.cos, torch.sin))
        return GridTables(cos, sin, embedding, order, windows)

    def _position_embedding(self, grid: Grid, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Tensor:
        """Interpolate the square grid of learned embeddings at the places of an image's patches: [patches, hidden]."""
        table: Tensor = self.visual.pos_embed.weight  # [side * side, hidden]
        side = math.isqrt(len(table))
        (row_taps, row_weights), (column_taps, column_weights) = (
            _taps(rows, grid[1], side),
            _taps(columns, grid[2], side),
        )
        taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(-1, 4)
        weights = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4, 1)
        return (table[upload(taps, self.device)] * upload(weights, self.device)).sum(1).to(self.dtype)


def _parts(images: Sequence[ImageInput]) -> Iterator[list[ImageInput]]:
    """Cut into parts of at most `PATCHES_AT_ONCE`, or of one image."""
    part: list[ImageInput] = []
    patches = 0
    for image in images:
        if part and patches + len(image.pixels) > PATCHES_AT_ONCE:
            yield part
            part, patches = [], 0
        part.append(image)
        patches += len(image.pixels)
    if part:
        yield part


def _attention(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor, spans: Spans) -> Tensor:
    """Attend with the weights of a transformers module: normed [patches, hidden] -> [patches, hidden]."""
    heads = attention.num_heads
    qkv = attention.qkv(normed).unflatten(1, (3 * heads, -1))  # [patches, 3 * heads, head_dim]
    rotated = rotate(qkv[:, : 2 * heads], None, cos, sin, eps=0.0, zero_centred=False)  # [patches, 2 * heads, head_dim]
    mixed = spans.attend(rotated[:, :heads], rotated[:, heads:], qkv[:, 2 * heads :], attention.scaling)
    out: Tensor = attention.proj(mixed.flatten(1))
    return out


def _add_norm(norm: Any, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of hidden and delta [patches, hidden], and its norm by a transformers module."""
    if delta is None:
        return hidden, norm(hidden)
    if isinstance(norm, nn.LayerNorm):
        assert norm.bias is not None
        return add_layer_norm(hidden, delta, norm.weight, norm.bias, norm.eps)
    return add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon, zero_centred=False)


def patch_places(grid: Grid, merge: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch [patches], those that are merged next to each other."""
    frames, rows, columns = grid

    def in_order(places: NDArray[np.int64]) -> NDArray[np.int64]:
        blocks = places.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3)
        return np.tile(blocks.reshape(-1), frames)

    down, across = np.indices((rows, columns))
    return in_order(down), in_order(across)


def window_order(grid: Grid, merge: int, window: int) -> tuple[NDArray[np.int64], list[int]]:
    """The merged patches of an image window by window, and the patches of each window: fewer at the edges."""
    frame, row, column = np.indices((grid[0], grid[1] // merge, grid[2] // merge))
    down, across = -(-grid[1] // merge // window), -(-grid[2] // merge // window)  # windows along each side
    of_each = ((frame * down + row // window) * across + column // window).reshape(-1)  # [image tokens]
    return np.argsort(of_each, kind="stable"), (np.bincount(of_each) * merge**2).tolist()


def _taps(places: NDArray[np.int64], size: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Interpolate places among `size` on a row of `side`, edge to edge: neighbours and weights, both [n, 2]."""
    source = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = np.floor(source)
    ahead = np.arange(2, dtype=np.float32)
    taps = np.minimum(first[:, None] + ahead, side - 1).astype(np.int64)
    return taps, 1 - np.abs(source[:, None] - first[:, None] - ahead)
