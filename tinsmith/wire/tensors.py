"""Tensors of a request: from the wire (dense or CSR, little endian) to dense numpy arrays.

The bytes are untrusted: every size is checked before memory is allocated.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import UserError
from tinsmith.wire import tinker_pb2

Array = NDArray[np.float32] | NDArray[np.int64]

ExpertIndices = NDArray[np.uint8] | NDArray[np.int16]
"""[mixtures of experts, tokens, experts of a token] the experts that computed each token; int16 of more than 256."""

_DTYPES: dict[int, np.dtype[Any]] = {
    tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_pb2.DTYPE_INT64: np.dtype("<i8"),
}
_INDEX = np.dtype("<i8")


MAX_COLUMNS = 4096
"""Most columns of a CSR tensor: targets of a position.

Columns take no bytes on the wire, so this limits how much larger a dense tensor can be.
"""

_MAX_DIMENSIONS = 8


def to_dense(tensor: tinker_pb2.Tensor, max_elements: int) -> Array:
    """The tensor as a dense writable array of float32 or int64; unlisted entries of a CSR tensor are 0.

    A dense tensor without a shape is one-dimensional. Raises UserError: another dtype, sizes that do not fit together,
    indices out of range, or more than `max_elements` elements.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"dtype {tensor.dtype} is not supported; send float32 (1) or int64 (2)")
    encoding = tensor.WhichOneof("encoding")
    if encoding is None:
        raise UserError("the tensor holds neither dense nor sparse_csr data")
    if encoding == "sparse_csr":
        return _from_csr(tensor.sparse_csr, dtype, _checked_shape(tensor, max_elements))
    values = from_bytes(tensor.dense, dtype, "dense")
    shape = _checked_shape(tensor, max_elements) if tensor.shape else (len(values),)
    if math.prod(shape) != len(values):
        raise UserError(f"shape {list(shape)} needs {math.prod(shape)} values, but there are {len(values)}")
    return values.reshape(shape).copy()


def _checked_shape(tensor: tinker_pb2.Tensor, max_elements: int) -> tuple[int, ...]:
    if len(tensor.shape) > _MAX_DIMENSIONS:  # before it is multiplied: a shape is as long as the client likes
        raise UserError(f"shape has {len(tensor.shape)} dimensions; at most {_MAX_DIMENSIONS} are taken")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise UserError(f"shape {list(shape)} has a negative dimension")
    if math.prod(shape) > max_elements:
        raise UserError(
            f"shape {list(shape)} has {math.prod(shape)} elements, the request has room for {max_elements}: "
            "send smaller requests"
        )
    return shape


def from_bytes(data: bytes, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """The numbers in `data`, the field `name`. Raises UserError for a cut one."""
    if len(data) % dtype.itemsize:
        raise UserError(f"{name} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _from_csr(csr: tinker_pb2.SparseCsr, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if len(shape) != 2:
        raise UserError(f"a CSR tensor needs a shape [rows, columns], got {list(shape)}")
    rows, columns = shape
    if columns > MAX_COLUMNS:
        raise UserError(
            f"shape {list(shape)} has {columns} columns; a CSR tensor may have up to {MAX_COLUMNS}: "
            "send fewer a position"
        )
    values = from_bytes(csr.values, dtype, "values")
    crow = from_bytes(csr.crow_indices, _INDEX, "crow_indices")
    col = from_bytes(csr.col_indices, _INDEX, "col_indices")
    row = csr_rows(crow, col, len(values), (rows, columns))
    dense: Array = np.zeros(shape, dtype=dtype)
    dense[row, col] = values
    return dense


def csr_rows(crow: NDArray[np.int64], col: NDArray[np.int64], values: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    """The row of each of the `values` entries of a CSR matrix. Raises UserError for indices that do not fit."""
    rows, columns = shape
    if len(crow) != rows + 1:
        raise UserError(f"crow_indices has {len(crow)} entries; {rows} rows need {rows + 1}")
    if len(col) != values:
        raise UserError(f"col_indices has {len(col)} entries for {values} values")
    if crow[0] != 0 or crow[-1] != values or np.any(crow[1:] < crow[:-1]):
        raise UserError(f"crow_indices must rise from 0 to the number of values, {values}")
    if len(col) and (col.min() < 0 or col.max() >= columns):
        first = np.flatnonzero((col < 0) | (col >= columns))[0]
        raise UserError(f"col_indices at position {first} is {col[first]}; indices must lie in [0, {columns})")
    row: NDArray[np.int64] = np.repeat(np.arange(rows), np.diff(crow))
    if np.any((row[1:] == row[:-1]) & (col[1:] <= col[:-1])):
        raise UserError("col_indices must rise within each row")
    return row
