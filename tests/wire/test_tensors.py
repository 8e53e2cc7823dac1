"""Tensors: every layout that the SDK sends, and hostile ones."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tinker import TensorData
from tinker.proto.request_conv import _tensor_data_to_proto

from tinsmith.errors import UserError
from tinsmith.wire import tinker_pb2
from tinsmith.wire.tensors import to_dense


def as_ours(tensor: TensorData) -> tinker_pb2.Tensor:
    return tinker_pb2.Tensor.FromString(_tensor_data_to_proto(tensor).SerializeToString())


def int64(*values: int) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


def csr(shape: list[int], crow: bytes, col: bytes, values: bytes) -> tinker_pb2.Tensor:
    sparse = tinker_pb2.SparseCsr(values=values, crow_indices=crow, col_indices=col)
    return tinker_pb2.Tensor(sparse_csr=sparse, dtype=tinker_pb2.DTYPE_INT64, shape=shape)


shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
floats = hnp.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False))
integers = hnp.arrays(np.int64, shapes)


@given(st.one_of(floats, integers))
def test_dense_tensors_arrive_as_the_sdk_sent_them(array: NDArray[Any]) -> None:
    decoded = to_dense(as_ours(TensorData.from_numpy(array)), 1000)
    assert decoded.dtype == array.dtype
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, array)


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.integers(0, 2)))
def test_sparse_tensors_arrive_dense(array: NDArray[Any]) -> None:
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.count_nonzero(array, axis=1))])
    tensor = csr(list(array.shape), int64(*crow), int64(*columns), int64(*array[rows, columns]))
    np.testing.assert_array_equal(to_dense(tensor, 64), array)


def test_the_sdk_chooses_csr_and_we_read_it() -> None:
    dense = torch.zeros(4, 8)
    dense[1, 2], dense[3, 7] = 1.5, -2.0
    tensor = as_ours(TensorData.from_torch_sparse(dense))
    assert tensor.WhichOneof("encoding") == "sparse_csr"
    np.testing.assert_array_equal(to_dense(tensor, 32), dense.numpy())
    without_shape = tinker_pb2.Tensor(dense=int64(1, 2, 3), dtype=tinker_pb2.DTYPE_INT64)
    assert to_dense(without_shape, 3).tolist() == [1, 2, 3]


def of_int64(dense: bytes, *shape: int) -> tinker_pb2.Tensor:
    return tinker_pb2.Tensor(dense=dense, dtype=tinker_pb2.DTYPE_INT64, shape=shape)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (tinker_pb2.Tensor(dense=b"", dtype=tinker_pb2.DTYPE_BFLOAT16), "dtype 4 is not supported"),
        (tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64), "neither dense nor sparse_csr"),
        (of_int64(b"123"), "dense has 3 bytes"),
        (of_int64(int64(1, 2), 3), r"shape \[3\] needs 3 values"),
        (of_int64(int64(1), -1, -1), "negative dimension"),
        # Which are not multiplied
        (of_int64(b"", *[127] * 10**6), "shape has 1000000 dimensions; at most 8 are taken"),
        (csr([10**9, 10**9], int64(0), b"", b""), "the request has room for 100"),
        (csr([2**40, 2**40], int64(0), b"", b""), "the request has room for 100"),
        (csr([2], int64(0, 0, 0), b"", b""), r"shape \[rows, columns\]"),
        (csr([2, 2], int64(0, 1), int64(0), int64(7)), "2 rows need 3"),
        *(
            (csr([2, 2], int64(*crow), int64(0), int64(7)), "must rise from 0")
            for crow in ((0, 2, 1), (1, 1, 1), (0, 0, 2))
        ),
        *((csr([2, 2], int64(0, 1, 1), int64(col), int64(7)), r"must lie in \[0, 2\)") for col in (2, -1)),
        (csr([2, 2], int64(0, 2, 2), int64(1, 1), int64(7, 8)), "must rise within each row"),
        (csr([2, 2], int64(0, 1, 1), int64(0, 1), int64(7)), "2 entries for 1 values"),
        (csr([0, 2], b"", b"", b""), "0 rows need 1"),
    ],
)
def test_hostile_tensors_are_refused(tensor: tinker_pb2.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_dense(tensor, 100)


def test_a_sparse_tensor_of_few_bytes_does_not_become_large() -> None:
    with pytest.raises(UserError, match=r"shape \[10, 8000000\] has 8000000 columns; a CSR tensor may have up to 4096"):
        to_dense(csr([10, 8_000_000], int64(*[0] * 11), b"", b""), 2**27)
    assert to_dense(csr([10, 4096], int64(*[0] * 11), b"", b""), 2**27).shape == (10, 4096)
