"""Token ids and columns as the bytes of the contract: int32, float32 and uint8, little-endian.

Invariant: an array made from bytes is a read-only view; lengths are checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.runtime.errors import InvalidInput

IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")


def ids_from(data: bytes, *, where: str) -> list[int]:
    """Token ids of ``data``; raises InvalidInput when it is no int32 array or has a negative id."""
    if len(data) % IDS.itemsize:
        raise InvalidInput(f"{len(data)} bytes are no int32 array", where=where)
    array: NDArray[np.int32] = np.frombuffer(data, IDS)
    if array.size and int(array.min()) < 0:
        raise InvalidInput("A token id is negative", where=where)
    ids: list[int] = array.tolist()
    return ids


def ids_bytes(ids: Sequence[int]) -> bytes:
    """``ids`` as int32."""
    return np.asarray(ids, IDS).tobytes()


def logprobs_bytes(values: Sequence[float]) -> bytes:
    """``values`` as float32."""
    return np.asarray(values, LOGPROBS).tobytes()
