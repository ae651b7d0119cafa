"""The frames between the service and a verifier process: 4 bytes of length (big-endian), then UTF-8 JSON.

Invariant: a frame is at most ``MAX_FRAME`` bytes, so that a broken peer cannot make the other side allocate.
Standard library only: verifier processes import this before anything else.
"""

from __future__ import annotations

import json
import struct
from typing import Any

MAX_FRAME = 64 * 1024 * 1024
HEADER = struct.Struct(">I")


def encode(value: Any) -> bytes:
    """``value`` as a frame; raises ValueError when it is too large, or has NaN or infinity in it."""
    body = json.dumps(value, allow_nan=False).encode()
    return HEADER.pack(checked(len(body))) + body


def checked(length: int) -> int:
    """``length`` of a frame's body, if it is allowed."""
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is too large")
    return length
