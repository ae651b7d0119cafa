"""The controller's side of the books: lease, commit, durability, restore, progress and the end of a book.

Invariants: every call may be repeated; an older epoch changes nothing; long sweeps go step by step or in
batches, each of them atomic, so that Redis is never held up for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer import keys
from services.buffer.transitions import Transitions
from services.runtime.errors import InvalidInput
from services.runtime.redis_errors import translated

BATCH = 256
DEAD_LETTERS = 1000
_ORDER: dict[int, str] = {
    pb.LEASE_ORDER_UNSPECIFIED: "in_order",
    pb.LEASE_ORDER_IN_ORDER: "in_order",
    pb.LEASE_ORDER_READY_FIRST: "ready_first",
}


class Steps:
    """What the step loop and validation do, as atomic transitions."""

    def __init__(self, transitions: Transitions) -> None:
        self._do = transitions

    async def lease(self, request: pb.LeaseRequest) -> pb.LeaseResponse:
        """The step's manifest, or what it waits for (does not wait itself). Raises Fenced."""
        if not request.groups:
            raise InvalidInput("A step needs groups", where="groups")
        step = request.fence.step
        status, *reply = await self._do.call(
            request.run,
            "lease",
            request.fence.epoch,
            step,
            request.groups,
            request.version,
            _ORDER[request.order],
        )
        if status == b"waiting":
            return pb.LeaseResponse(ready=reply[0], missing=reply[1], open=reply[2])
        groups = [_manifest_group(*group) for group in reply]
        manifest = pb.Manifest(run=request.run, book=keys.TRAIN, step=step, groups=groups)
        return pb.LeaseResponse(manifest=manifest, ready=len(groups))

    async def commit(self, run: str, fence: types.Fence) -> tuple[int, int]:
        """leased -> trained; returns (groups, samples) of the step. Raises Fenced, Refused if not leased."""
        reply = await self._do.call(run, "commit", fence.epoch, fence.step)
        return reply[1], reply[2]

    async def mark_durable(self, run: str, fence: types.Fence) -> int:
        """trained -> durable through ``fence.step``; returns the groups of the steps newly covered."""
        first = min(await self._counter(run, keys.TRAIN, "durable"), fence.step)
        groups = 0
        for step in range(first, fence.step + 1):
            groups += (await self._do.call(run, "durable", fence.epoch, step))[1]
        return groups

    async def restore(self, run: str, fence: types.Fence, completed: int) -> int:
        """Groups of steps >= ``completed`` are ready again; returns how many wait to be trained again.

        Raises Fenced, and Refused when such a step is durable (its trajectories are gone).
        """
        highest = await self._counter(run, keys.TRAIN, "max_step")
        groups = 0
        for step in range(completed, max(highest, completed) + 1):
            groups += (await self._do.call(run, "restore", fence.epoch, step, completed))[1]
        return groups

    async def drop_open(self, run: str, book: str, reason: str) -> int:
        """Drop every group of ``book`` that is neither trained nor dropped; returns how many."""
        if not reason or not reason.isprintable():
            raise InvalidInput("A drop needs a reason in one line", where="reason")
        groups, dropped = 0, BATCH
        while dropped == BATCH:
            dropped = (await self._do.call(run, "drop_open", keys.checked_book(book), reason, BATCH))[1]
            groups += dropped
        return groups

    async def progress(self, run: str, book: str) -> pb.ProgressResponse:
        """The cached counts of ``book``; all zero for a book that nobody opened."""
        await self._do.require(run)
        with translated("buffer, progress"):
            raw: Any = await self._do.redis.hgetall(keys.counters(run, keys.checked_book(book)))
        counts = {name.decode(): int(value) for name, value in raw.items()}
        states = {name[6:]: value for name, value in counts.items() if name.startswith("state:") and value}
        return pb.ProgressResponse(
            groups=_book_counts(counts, "g"),
            samples=_book_counts(counts, "s"),
            groups_by_state=states,
            samples_queued=counts.get("queued", 0),
            samples_claimed=counts.get("claimed", 0),
            samples_done=counts.get("done", 0),
            redeliveries=counts.get("redeliveries", 0),
            duplicates=counts.get("duplicates", 0),
        )

    async def close_book(self, run: str, book: str) -> pb.CloseBookResponse:
        """Close ``book``; its results by ordinal and sample, lost samples included (without a reward)."""
        if keys.checked_book(book) == keys.TRAIN:
            raise InvalidInput("The train book is never closed", where="book", do="Use DropOpen.")
        closed = BATCH
        while closed == BATCH:
            closed = (await self._do.call(run, "close", book, BATCH))[1]
        counts = await self.progress(run, book)
        results = await self._results(run, book)
        return pb.CloseBookResponse(results=results, groups=counts.groups, samples=counts.samples)

    async def dead_letters(self, run: str, limit: int) -> list[pb.DeadLetter]:
        """The newest samples that were given up."""
        await self._do.require(run)
        with translated("buffer, dead letters"):
            entries: Any = await self._do.redis.xrevrange(
                f"{keys.prefix(run)}dead", count=min(limit or DEAD_LETTERS, DEAD_LETTERS)
            )
        return [_dead_letter(run, fields) for _, fields in entries]

    async def _counter(self, run: str, book: str, field: str) -> int:
        with translated("buffer"):
            found: Any = await self._do.redis.hget(keys.counters(run, book), field)
        return int(found or 0)

    async def _results(self, run: str, book: str) -> list[pb.SampleResult]:
        redis, results = self._do.redis, []
        with translated("buffer, results"):
            members: Any = await redis.zrange(f"{keys.prefix(run)}all:{book}", 0, -1)
            ordinals = [int(member) for member in members]
            for start in range(0, len(ordinals), BATCH):
                part = ordinals[start : start + BATCH]
                pipe = redis.pipeline(transaction=False)
                for ordinal in part:
                    pipe.hgetall(keys.group(run, book, ordinal))
                for ordinal, record in zip(part, await pipe.execute(), strict=True):
                    results += _group_results(ordinal, record)
        return results


def _manifest_group(ordinal: bytes, samples: list[bytes | None], roots: list[bytes]) -> pb.ManifestGroup:
    group = pb.ManifestGroup(group=int(ordinal))
    for raw, root in zip(samples, roots, strict=True):
        if raw is not None:
            sample = group.samples.add()
            sample.ParseFromString(raw)
            sample.trace.ParseFromString(root)
    return group


def _book_counts(counts: Mapping[str, int], unit: str) -> pb.BookCounts:
    lead = f"{unit}:dropped:"
    return pb.BookCounts(
        dispatched=counts.get(f"{unit}:dispatched", 0),
        trained=counts.get(f"{unit}:trained", 0),
        open=counts.get(f"{unit}:open", 0),
        dropped={
            name[len(lead) :]: value for name, value in counts.items() if name.startswith(lead) and value
        },
    )


def _group_results(ordinal: int, record: Mapping[bytes, bytes]) -> list[pb.SampleResult]:
    results = []
    for sample in range(int(record[b"n"])):
        stored = record.get(b"r%d" % sample)
        if stored is not None:
            results.append(pb.SampleResult.FromString(stored))
            continue
        outcome = int(record.get(b"o%d" % sample, int(types.OUTCOME_CANCELLED)))
        results.append(
            pb.SampleResult(group=ordinal, sample=sample, outcome=types.Outcome.ValueType(outcome))
        )
    return results


def _dead_letter(run: str, fields: Mapping[bytes, bytes]) -> pb.DeadLetter:
    key = types.SampleKey(
        run=run, book=fields[b"b"].decode(), group=int(fields[b"g"]), sample=int(fields[b"i"])
    )
    return pb.DeadLetter(
        ref=pb.ClaimRef(key=key, attempt=int(fields[b"a"])),
        outcome=types.Outcome.ValueType(int(fields[b"o"])),
        message=fields[b"m"].decode(errors="replace"),
        at_ns=int(fields[b"at"]),
    )
