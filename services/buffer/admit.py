"""The admission loop: reads complete groups from the stream, judges them, writes the decisions.

Invariants: any number of replicas read the stream as one consumer group, so each group is judged once; what a
dead replica has read and not decided is taken over after ``TAKE_OVER_MS``; a decision found in place is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer import keys
from services.buffer.admission import Candidate, Rules, judge
from services.buffer.transitions import Transitions
from services.runtime.redis_errors import translated
from services.runtime.redis_scripts import Argument

READER = "admission"
BATCH = 64
BLOCK_MS = 1000
TAKE_OVER_MS = 5000

Entry = tuple[bytes, Mapping[bytes, bytes] | None]


class Admission:
    """Judges the complete groups of one run as ``consumer``, which names this replica."""

    def __init__(self, transitions: Transitions, run: str, consumer: str) -> None:
        self._do = transitions
        self._run = run
        self._consumer = consumer
        self._stream = f"{keys.prefix(run)}complete"

    async def take_new(self, block_ms: int | None = BLOCK_MS) -> int:
        """Decide about groups that just became complete; waits up to ``block_ms``. Returns groups decided."""
        with translated("buffer, admission"):
            reply: Any = await self._redis.xreadgroup(
                READER, self._consumer, {self._stream: ">"}, count=BATCH, block=block_ms
            )
        return await self._decide(reply[0][1]) if reply else 0

    async def take_over(self, idle_ms: int = TAKE_OVER_MS) -> int:
        """Decide about what another replica has read and left for ``idle_ms``. Returns groups decided."""
        cursor: Any = b"0-0"
        decided = 0
        while True:
            with translated("buffer, admission"):
                reply: Any = await self._redis.xautoclaim(
                    self._stream, READER, self._consumer, idle_ms, cursor, count=BATCH
                )
            cursor = reply[0]
            decided += await self._decide(reply[1])
            if cursor in (b"0-0", "0-0"):
                return decided

    @property
    def _redis(self) -> Redis:
        return self._do.redis

    async def _decide(self, entries: Sequence[Entry]) -> int:
        # Redis 6.2 lists entries that are deleted already with no fields.
        found = [(entry, fields) for entry, fields in entries if fields]
        if not found:
            return 0
        names = [part for _, fields in found for part in (fields[b"b"], fields[b"g"])]
        _, raw_rules, *rows = await self._do.call(self._run, "candidates", *names)
        rules = _rules(*raw_rules)
        args: list[Argument] = []
        for (entry, fields), row in zip(found, rows, strict=True):
            reason, lowest = _judge(fields[b"b"].decode(), row, rules)
            args += [entry, fields[b"b"], fields[b"g"], reason, "" if lowest is None else lowest]
        await self._do.call(self._run, "admit", *args)
        return len(found)


def _rules(zero_variance: bytes, minimum: bytes, max_age: bytes) -> Rules:
    return Rules(
        drop_zero_variance=zero_variance == b"1",
        minimum_siblings=int(minimum),
        max_age=int(max_age) if max_age else None,
    )


def _judge(book: str, row: Sequence[Any], rules: Rules) -> tuple[str, int | None]:
    state, size, step, *raw = row
    if state != b"complete":
        return "", None  # decided by another replica: the script leaves it alone
    samples = [pb.ManifestSample.FromString(sample) for sample in raw]
    group = Candidate(
        samples=size,
        step=step,
        rewards=[sample.reward if sample.HasField("reward") else None for sample in samples],
        versions=[sample.version if sample.HasField("version") else None for sample in samples],
    )
    return (judge(group, rules) if book == keys.TRAIN else ""), group.lowest_version
