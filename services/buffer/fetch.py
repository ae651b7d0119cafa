"""Trajectories on their way to the trainer: payloads and prompts joined again, group by group.

Invariants: groups come in the order asked for; what is not there any more is an error that names the group,
never a shorter answer; no more than ``BATCH`` groups are in memory at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer import keys, payload
from services.runtime.errors import NotFound, Refused
from services.runtime.redis_errors import translated

BATCH = 8


async def fetch(
    redis: Redis, run: str, book: str, ordinals: Sequence[int]
) -> AsyncIterator[pb.TrajectoryGroup]:
    """Yield the finished samples of each group; raises NotFound, and Refused for retired or open ones."""
    for start in range(0, len(ordinals), BATCH):
        part = ordinals[start : start + BATCH]
        records = await _records(redis, run, book, part)
        wanted = {ordinal: _finished(ordinal, record) for ordinal, record in zip(part, records, strict=True)}
        names = []
        for ordinal, samples in wanted.items():
            names.append(keys.prompt(run, book, ordinal))
            names += [keys.payload(run, book, ordinal, sample) for sample in samples]
        with translated("buffer, fetch"):
            found: Any = await redis.mget(names)
        values = iter(found)
        for ordinal, samples in wanted.items():
            prompt = next(values)
            payloads = [next(values) for _ in samples]
            yield _group(ordinal, prompt, payloads)


async def _records(redis: Redis, run: str, book: str, ordinals: Sequence[int]) -> list[dict[bytes, bytes]]:
    pipe = redis.pipeline(transaction=False)
    for ordinal in ordinals:
        pipe.hgetall(keys.group(run, book, ordinal))
    with translated("buffer, fetch"):
        found: list[dict[bytes, bytes]] = await pipe.execute()
    return found


def _finished(ordinal: int, record: Mapping[bytes, bytes]) -> list[int]:
    if not record:
        raise NotFound(f"There is no group {ordinal}", where="buffer, Fetch")
    state = record[b"state"].decode()
    if state in ("open", "dropped", "durable"):
        raise Refused(f"Group {ordinal} is {state}; it has no trajectories to fetch", where="buffer, Fetch")
    return [sample for sample in range(int(record[b"n"])) if record[b"s%d" % sample] == b"d"]


def _group(ordinal: int, prompt: bytes | None, payloads: Sequence[bytes | None]) -> pb.TrajectoryGroup:
    group = pb.TrajectoryGroup(group=ordinal)
    for stored in payloads:
        if stored is None:
            # Retired between the two reads.
            raise Refused(f"The trajectories of group {ordinal} have been retired", where="buffer, Fetch")
        group.trajectories.append(payload.unpack(stored, prompt))
    return group
