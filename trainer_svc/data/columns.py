"""Token columns of a trajectory as numpy arrays, checked against their own description."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.headrace.v1 import types_pb2
from services.runtime.errors import Corrupt

Array = npt.NDArray[Any]
NUMPY: dict[types_pb2.DType.ValueType, npt.DTypeLike] = {
    types_pb2.DTYPE_UINT8: "<u1",
    types_pb2.DTYPE_INT8: "<i1",
    types_pb2.DTYPE_INT16: "<i2",
    types_pb2.DTYPE_INT32: "<i4",
    types_pb2.DTYPE_INT64: "<i8",
    types_pb2.DTYPE_FLOAT16: "<f2",
    types_pb2.DTYPE_FLOAT32: "<f4",
    types_pb2.DTYPE_FLOAT64: "<f8",
}
REQUIRED: dict[str, types_pb2.DType.ValueType] = {
    "ids": types_pb2.DTYPE_INT32,
    "logprobs": types_pb2.DTYPE_FLOAT32,
    "versions": types_pb2.DTYPE_INT32,
    "mask": types_pb2.DTYPE_UINT8,
}


def read_columns(trajectory: types_pb2.Trajectory, tokens: int, where: str) -> dict[str, Array]:
    """The four columns every trajectory has, each [tokens]; raises Corrupt naming the column."""
    by_name = {column.name: column for column in trajectory.columns}
    return {name: _read(by_name.get(name), name, dtype, tokens, where) for name, dtype in REQUIRED.items()}


def _read(
    column: types_pb2.Column | None, name: str, dtype: types_pb2.DType.ValueType, tokens: int, where: str
) -> Array:
    if column is None:
        raise Corrupt(f"Column {name} is missing", where=where)
    if column.dtype != dtype:
        kind = types_pb2.DType.Name
        raise Corrupt(f"Column {name} is {kind(column.dtype)}, not {kind(dtype)}", where=where)
    kind_of = np.dtype(NUMPY[dtype])
    if list(column.shape) != [tokens] or len(column.data) != prod(column.shape) * kind_of.itemsize:
        raise Corrupt(
            f"Column {name} has shape {list(column.shape)} and {len(column.data)} bytes for {tokens} tokens",
            where=where,
        )
    return np.frombuffer(column.data, dtype=kind_of)
