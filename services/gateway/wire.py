"""Protobuf values as JSON shows them.

Invariants: an enum is the lower-case word of its name; a time is seconds since 1970 (a JavaScript number
cannot hold nanoseconds); a number that JSON has no word for (NaN, infinity) is null.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from protos.headrace.v1 import types_pb2
from services.runtime.errors import Corrupt

_DTYPES = {
    types_pb2.DTYPE_UINT8: "u1", types_pb2.DTYPE_INT8: "i1", types_pb2.DTYPE_INT16: "<i2",
    types_pb2.DTYPE_INT32: "<i4", types_pb2.DTYPE_INT64: "<i8", types_pb2.DTYPE_FLOAT16: "<f2",
    types_pb2.DTYPE_FLOAT32: "<f4", types_pb2.DTYPE_FLOAT64: "<f8",
}  # fmt: skip


def word(enum: Any, value: int, prefix: str) -> str:
    """ "running" for RUN_STATUS_RUNNING with prefix ``RUN_STATUS_``."""
    return str(enum.Name(value)).removeprefix(prefix).lower()


def seconds(nanoseconds: int) -> float | None:
    """Seconds since 1970; None for 0, which means never."""
    return nanoseconds / 1e9 if nanoseconds else None


def finite(value: float) -> float | None:
    """``value``, None when it is no number."""
    return value if math.isfinite(value) else None


def numbers(values: Any) -> dict[str, float | None]:
    """A protobuf map of numbers."""
    return {key: finite(value) for key, value in values.items()}


def column(found: types_pb2.Column) -> list[Any]:
    """A token-aligned column as (nested) lists; raises Corrupt when its bytes do not fit its shape."""
    data: Any
    try:
        if found.dtype == types_pb2.DTYPE_BFLOAT16:
            data = (np.frombuffer(found.data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            data = np.frombuffer(found.data, _DTYPES[found.dtype])
        data = data.reshape(tuple(found.shape))
    except (KeyError, ValueError) as exc:
        raise Corrupt(f"Column {found.name} does not fit its description", where="gateway") from exc
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        bad = ~np.isfinite(data)
        data = data.astype(object)
        data[bad] = None
    listed: list[Any] = data.tolist()
    return listed
