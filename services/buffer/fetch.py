"""Trajectories on their way to the trainer: payloads and prompts joined again, group by group.

Groups are put together as bytes of a TrajectoryGroup: what lies in Redis whole is copied, not parsed.

Invariants: groups come in the order asked for; what is not there any more is an error that names the group,
never a shorter answer; no more than ``BATCH`` groups are in memory at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer import keys, payload
from services.buffer.transitions import Transitions
from services.runtime.errors import NotFound, Refused
from services.runtime.redis_errors import translated

BATCH = 8
# Of a length-delimited field (wire type 2).
_TAG = bytes([pb.TrajectoryGroup.TRAJECTORIES_FIELD_NUMBER << 3 | 2])


async def fetch(do: Transitions, run: str, book: str, ordinals: Sequence[int]) -> AsyncIterator[bytes]:
    """Yield each group with its finished samples, a serialised TrajectoryGroup; raises NotFound, and Refused
    for retired or open ones."""
    for start in range(0, len(ordinals), BATCH):
        part = ordinals[start : start + BATCH]
        _, *found = await do.call(run, "finished", book, *part)
        rows = zip(part, found[::2], found[1::2], strict=True)
        wanted = {ordinal: _finished(ordinal, state.decode(), samples) for ordinal, state, samples in rows}
        names = []
        for ordinal, samples in wanted.items():
            names.append(keys.prompt(run, book, ordinal))
            names += [keys.payload(run, book, ordinal, sample) for sample in samples]
        with translated("buffer, fetch"):
            stored: Any = await do.redis.mget(names)
        values = iter(stored)
        for ordinal, samples in wanted.items():
            prompt = next(values)
            payloads = [next(values) for _ in samples]
            yield _group(ordinal, prompt, payloads)


def _finished(ordinal: int, state: str, samples: bytes) -> list[int]:
    if not state:
        raise NotFound(f"There is no group {ordinal}", where="buffer, Fetch")
    if state in ("open", "dropped", "durable"):
        raise Refused(f"Group {ordinal} is {state}; it has no trajectories to fetch", where="buffer, Fetch")
    return [int(sample) for sample in samples.split()]


def _group(ordinal: int, prompt: bytes | None, payloads: Sequence[bytes | None]) -> bytes:
    parts: list[bytes | memoryview] = [pb.TrajectoryGroup(group=ordinal).SerializeToString()]
    for stored in payloads:
        if stored is None:
            # Retired between the two reads.
            raise Refused(f"The trajectories of group {ordinal} have been retired", where="buffer, Fetch")
        trajectory = payload.serialised(stored, prompt)
        parts += [_TAG, _varint(len(trajectory)), trajectory]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """``value`` as protobuf writes a length."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
