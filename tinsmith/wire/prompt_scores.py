"""Questions of a request about its own prompt, and the answers on the wire.

Position p is scored by what the model predicts after p - 1; position 0 has no score.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field

from tinsmith.errors import UserError, located, quoted, translated
from tinsmith.wire import tinker_pb2
from tinsmith.wire.json_body import StrictModel
from tinsmith.wire.tensors import csr_rows

MAX_TOPK = 1024
"""Largest k of top-k and of alternative tokens."""
MAX_CELLS = 2**23
"""Most numbers of one kind in a reply: 64 MiB with ids."""
NO_LOGPROB = -99999.0
"""The log-probability of an empty top-k cell, of id 0."""


@dataclass(frozen=True, eq=False)
class TargetIds:
    """Ids to score: a dense or CSR matrix [n - 1, K] whose row i is about position i + 1. So is the answer."""

    shape: tuple[int, int]
    rows: NDArray[np.int64]
    """[cells] of all cells, or those that a CSR matrix lists."""
    ids: NDArray[np.int64]
    """[cells]; -1 asks for nothing."""
    crow: NDArray[np.int64] | None = None
    col: NDArray[np.int64] | None = None
    """Both only of a CSR matrix."""

    @property
    def first_row(self) -> int:
        """The first row that names an id; the number of rows if none does."""
        return int(min(self.rows[self.ids >= 0], default=self.shape[0]))


@dataclass(frozen=True, eq=False)
class PromptQuestions:
    """Questions about the prompt."""

    logprobs: bool = False
    topk: int = 0
    """The k likeliest tokens of each position."""
    last_n: int | None = None
    """Both only for the last n positions; None is all."""
    targets: TargetIds | None = None
    """Log-probabilities of these ids."""
    alternatives: int = 0
    """Tokens to draw at each position, at the request's temperature."""

    def __bool__(self) -> bool:
        return self.logprobs or bool(self.topk or self.alternatives) or self.targets is not None

    def scored_from(self, length: int) -> int:
        """The first position of `length` for which log-probabilities and top-k are wanted."""
        return 1 if self.last_n is None else length - self.last_n

    def check(self, length: int, vocab_size: int) -> None:
        """Raise UserError for what a prompt of `length` tokens, or this vocabulary, cannot answer."""
        if self.last_n is not None and not 1 <= self.last_n < length:
            raise UserError(
                f"prompt_logprobs_last_n is {self.last_n}; for this prompt it must be between 1 and {length - 1}"
            )
        for name, k in (("topk_prompt_logprobs", self.topk), ("prompt_alt_tokens_k", self.alternatives)):
            if k * length > MAX_CELLS:
                raise UserError(
                    f"{name}={k} for {length} prompt tokens is more than {MAX_CELLS} numbers; ask for fewer"
                )
        if self.topk > vocab_size:
            raise UserError(f"topk_prompt_logprobs is {self.topk}; the vocabulary has {vocab_size} tokens")
        if self.targets is not None:
            _check_targets(self.targets, length, vocab_size)


def _check_targets(targets: TargetIds, length: int, vocab_size: int) -> None:
    if targets.shape[0] != length - 1:
        raise UserError(
            f"target_prompt_logprobs has {targets.shape[0]} rows; a prompt of {length} tokens needs {length - 1}"
        )
    wrong = np.flatnonzero((targets.ids < -1) | (targets.ids >= vocab_size))
    if wrong.size:
        raise UserError(
            f"target_prompt_logprobs holds {targets.ids[wrong[0]]} in row {targets.rows[wrong[0]]}; "
            f"send ids below {vocab_size}, and -1 where nothing is asked"
        )


class TensorBody(StrictModel):
    """A tensor of int64 in JSON."""

    data: Annotated[list[int], FailFast()]
    dtype: Literal["int64"]
    shape: Annotated[list[int], Field(fail_fast=True)] | None = None
    sparse_crow_indices: Annotated[list[int], Field(fail_fast=True)] | None = None
    sparse_col_indices: Annotated[list[int], Field(fail_fast=True)] | None = None


def parse_targets(body: TensorBody) -> TargetIds:
    """The ids of `target_prompt_logprobs`. Raises UserError for what is no matrix."""
    if body.shape is None or len(body.shape) != 2 or min(body.shape) < 0 or max(body.shape) >= 2**31:
        raise UserError(f"target_prompt_logprobs.shape must be [prompt length - 1, K], got {quoted(body.shape)}")
    shape = body.shape[0], body.shape[1]
    ids = int64_array("target_prompt_logprobs.data", body.data)
    if len(ids) > MAX_CELLS:
        raise UserError(f"target_prompt_logprobs has {len(ids)} ids; at most {MAX_CELLS} can be scored at once")
    if body.sparse_crow_indices is None or body.sparse_col_indices is None:
        if len(ids) != shape[0] * shape[1] or body.sparse_crow_indices != body.sparse_col_indices:
            raise UserError(
                f"target_prompt_logprobs of shape {body.shape} has {len(ids)} ids; "
                "send all of them, or all indices of a CSR matrix"
            )
        return TargetIds(shape, np.repeat(np.arange(shape[0]), shape[1]), ids)
    crow = int64_array("target_prompt_logprobs.sparse_crow_indices", body.sparse_crow_indices)
    col = int64_array("target_prompt_logprobs.sparse_col_indices", body.sparse_col_indices)
    with located(lambda: "target_prompt_logprobs"):
        return TargetIds(shape, csr_rows(crow, col, len(ids), shape), ids, crow, col)


def int64_array(field: str, values: list[int]) -> NDArray[np.int64]:
    """The numbers of a field. Raises UserError if one does not fit."""
    with translated(OverflowError, UserError, lambda _: f"{field} holds a number of more than 64 bits"):
        return np.array(values, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The k likeliest tokens of each of n positions, likeliest first."""

    token_ids: NDArray[np.int32]
    """[n, k]; 0 where there is nothing."""
    logprobs: NDArray[np.float32]
    """[n, k]; `NO_LOGPROB` where there is nothing."""

    @classmethod
    def empty(cls, length: int, k: int) -> "TopLogprobs":
        return cls(np.zeros((length, k), dtype=np.int32), np.full((length, k), NO_LOGPROB, dtype=np.float32))

    def encode(self) -> tinker_pb2.TopkLogprobs:
        """Encode them as the little-endian rows of the wire."""
        length, k = self.token_ids.shape
        return tinker_pb2.TopkLogprobs(
            token_ids=self.token_ids.astype("<i4").tobytes(),
            logprobs=self.logprobs.astype("<f4").tobytes(),
            k=k,
            length=length,
        )


@dataclass(frozen=True, eq=False)
class TargetLogprobs:
    """Log-probabilities of the asked ids."""

    asked: TargetIds
    values: NDArray[np.float32]
    """[cells] of `asked`; 0.0 where nothing was asked, and for images."""

    def encode(self) -> tinker_pb2.Tensor:
        """Encode in the layout of the question."""
        values, crow, col = self.values.astype("<f4"), self.asked.crow, self.asked.col
        if crow is None or col is None:
            return _dense(values.reshape(self.asked.shape), tinker_pb2.DTYPE_FLOAT32)
        indices = {"crow_indices": crow.astype("<i8").tobytes(), "col_indices": col.astype("<i8").tobytes()}
        csr = tinker_pb2.SparseCsr(values=values.tobytes(), **indices)
        return tinker_pb2.Tensor(sparse_csr=csr, dtype=tinker_pb2.DTYPE_FLOAT32, shape=self.asked.shape)


@dataclass(frozen=True, eq=False)
class Alternatives:
    """Tokens drawn at each position but the first, with replacement."""

    token_ids: NDArray[np.int32]
    """[n - 1, k]"""
    logprobs: NDArray[np.float32]
    """[n - 1, k], of the model itself, at temperature 1."""


@dataclass(frozen=True, eq=False)
class PromptAnswers:
    """Answers about a prompt of n tokens; None if not asked."""

    logprobs: NDArray[np.float32] | None = None
    """[n]: NaN where nothing was computed, 0.0 for images."""
    topk: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    alternatives: Alternatives | None = None

    def encode_into(self, response: tinker_pb2.SampleResponse) -> None:
        """Put the answers into the reply."""
        if self.logprobs is not None:
            response.prompt_logprobs = self.logprobs.astype("<f4").tobytes()
        if self.topk is not None:
            response.topk_prompt_logprobs.CopyFrom(self.topk.encode())
        if self.targets is not None:
            response.target_prompt_logprobs.CopyFrom(self.targets.encode())
        if self.alternatives is not None:
            tokens, logprobs = self.alternatives.token_ids, self.alternatives.logprobs
            response.prompt_alt_tokens.tokens.CopyFrom(_dense(tokens.astype("<i4"), tinker_pb2.DTYPE_INT32))
            response.prompt_alt_tokens.logprobs.CopyFrom(_dense(logprobs.astype("<f4"), tinker_pb2.DTYPE_FLOAT32))


def _dense(array: NDArray[Any], dtype: tinker_pb2.DType) -> tinker_pb2.Tensor:
    return tinker_pb2.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)
