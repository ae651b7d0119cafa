"""Groups of a book for people: states, rewards and lengths, without tokens.

Invariants: reads only; a page is bounded; what was retired or folded is told by what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer import keys
from services.buffer.transitions import Transitions
from services.runtime.errors import InvalidInput
from services.runtime.redis_errors import translated

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
# Only these have a trajectory for each sample that is left; what is durable is retired.
FETCHABLE = frozenset({"complete", "ready", "leased", "trained"})
STATES = frozenset({"open", "complete", "ready", "leased", "trained", "durable", "dropped"})


class Listing:
    """Pages of groups."""

    def __init__(self, transitions: Transitions) -> None:
        self._do = transitions

    async def page(self, request: pb.ListGroupsRequest) -> list[pb.GroupSummary]:
        """Up to ``limit`` groups by ordinal, newest first where asked; raises InvalidInput."""
        book = keys.checked_book(request.book or keys.TRAIN)
        if request.state and request.state not in STATES:
            raise InvalidInput(
                f"There is no state {request.state!r}",
                where="state",
                do=f"One of {', '.join(sorted(STATES))}.",
            )
        await self._do.require(request.run)
        limit = min(request.limit or DEFAULT_LIMIT, MAX_LIMIT)
        found: list[pb.GroupSummary] = []
        at: int | None = await self._start(request, book)
        while at is not None and len(found) < limit:
            ordinals = _window(at, limit, newest=request.newest)
            records = await self._records(request.run, book, ordinals)
            for ordinal, (record, payloads) in zip(ordinals, records, strict=True):
                if record and (not request.state or record[b"state"].decode() == request.state):
                    found.append(_summary(ordinal, record, payloads=payloads))
            at = await self._next(request, book, ordinals)
        return found[:limit]

    async def _start(self, request: pb.ListGroupsRequest, book: str) -> int | None:
        if not request.newest:
            return request.from_group
        highest = await self._highest(request.run, book)
        if highest is None or not request.from_group:
            return highest
        return min(highest, request.from_group)

    async def _next(self, request: pb.ListGroupsRequest, book: str, seen: Sequence[int]) -> int | None:
        if request.newest:
            return seen[-1] - 1 if seen and seen[-1] > 0 else None
        highest = await self._highest(request.run, book)
        return seen[-1] + 1 if highest is not None and seen[-1] < highest else None

    async def _highest(self, run: str, book: str) -> int | None:
        """The highest ordinal that the book has seen; ordinals are dense from 0."""
        with translated("buffer, groups"):
            found: Any = await self._do.redis.hget(keys.counters(run, book), "g:dispatched")
        return int(found) - 1 if found and int(found) else None

    async def _records(
        self, run: str, book: str, ordinals: Sequence[int]
    ) -> list[tuple[Mapping[bytes, bytes], bool]]:
        with translated("buffer, groups"):
            pipe = self._do.redis.pipeline(transaction=False)
            for ordinal in ordinals:
                pipe.hgetall(keys.group(run, book, ordinal))
                pipe.exists(keys.prompt(run, book, ordinal), keys.payload(run, book, ordinal, 0))
            raw: Any = await pipe.execute()
        return [(record, bool(there)) for record, there in zip(raw[::2], raw[1::2], strict=True)]


def _window(at: int, size: int, *, newest: bool) -> list[int]:
    return list(range(at, max(-1, at - size), -1)) if newest else list(range(at, at + size))


def _summary(ordinal: int, record: Mapping[bytes, bytes], *, payloads: bool) -> pb.GroupSummary:
    size = int(record[b"n"])
    spec = pb.GroupSpec.FromString(record.get(b"spec", b""))
    summary = pb.GroupSummary(
        group=ordinal,
        state=record[b"state"].decode(),
        target_step=int(record[b"step"]),
        drop_reason=record.get(b"reason", b"").decode(),
        size=size,
        row_source=spec.row_source,
        payloads=payloads and record[b"state"].decode() in FETCHABLE,
        samples=[
            pb.ManifestSample.FromString(record[b"m%d" % i]) for i in range(size) if b"m%d" % i in record
        ],
    )
    if record.get(b"ts"):
        summary.trained_step = int(record[b"ts"])
    return summary
