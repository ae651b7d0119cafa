"""What a sample leaves behind: a trajectory, or the report of its failure.

Invariants
- A hand-in is repeated until the buffer has answered or ``GIVE_UP_S`` have passed (both are idempotent);
  after that the claim expires and somebody else does the sample.
- One trajectory that the buffer cannot take never takes the others of its batch with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from gym_svc.batching import Batcher
from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc, types_pb2
from services.runtime.chunks import CHUNK_BYTES, split
from services.runtime.errors import HeadraceError, Internal, NotReady, TimedOut
from services.runtime.logs import get_logger
from services.runtime.retry import backoff

GIVE_UP_S = 300.0
CALL_SECONDS = 30.0
CLOSE_SECONDS = 5.0
Answer = TypeVar("Answer")


class Outbox:
    """Hands trajectories and failures to the buffer, in small batches."""

    def __init__(self, stub: buffer_pb2_grpc.BufferAsyncStub, worker: str) -> None:
        self._stub = stub
        self._worker = worker
        self._log = get_logger("gym")
        self._appends: Batcher[types_pb2.Trajectory, buffer_pb2.AppendResult] = Batcher(self._append)
        self._fails: Batcher[buffer_pb2.FailedSample, int] = Batcher(self._fail)

    async def append(self, trajectory: types_pb2.Trajectory) -> buffer_pb2.AppendResult:
        """Hand in one trajectory; a duplicate is an answer like any other. Raises HeadraceError."""
        return await self._appends.submit(trajectory)

    async def fail(self, failed: buffer_pb2.FailedSample) -> int:
        """Report one failure; returns the buffer's FailDecision. Raises HeadraceError."""
        return await self._fails.submit(failed)

    async def close(self) -> None:
        """Finish open batches."""
        await self._appends.close(CLOSE_SECONDS)
        await self._fails.close(CLOSE_SECONDS)

    async def _append(self, items: Sequence[types_pb2.Trajectory]) -> Sequence[buffer_pb2.AppendResult]:
        try:
            return await self._append_all(items)
        except (NotReady, TimedOut):
            raise
        except HeadraceError as exc:
            if len(items) == 1:
                raise
            self._log.warning("a batch was refused; its trajectories go one by one", error=str(exc))
        return [await self._append_alone(item) for item in items]

    async def _append_alone(self, item: types_pb2.Trajectory) -> buffer_pb2.AppendResult:
        try:
            return (await self._append_all([item]))[0]
        except HeadraceError as exc:
            ref = buffer_pb2.ClaimRef(key=item.key, attempt=item.attempt)
            # UNSPECIFIED: the buffer has not judged it, so the caller reports it as a failure.
            status = buffer_pb2.APPEND_STATUS_UNSPECIFIED
            return buffer_pb2.AppendResult(ref=ref, status=status, message=str(exc))

    async def _append_all(self, items: Sequence[types_pb2.Trajectory]) -> Sequence[buffer_pb2.AppendResult]:
        request = buffer_pb2.AppendRequest(worker=self._worker, trajectories=items)
        if request.ByteSize() <= CHUNK_BYTES:
            answer = await _insist(lambda: self._stub.Append(request, timeout=CALL_SECONDS))
        else:
            data = request.SerializeToString()
            answer = await _insist(lambda: self._stub.AppendStream(_chunks(data), timeout=CALL_SECONDS))
        if len(answer.results) != len(items):
            raise Internal(f"{len(items)} trajectories, {len(answer.results)} results", where="Buffer.Append")
        return list(answer.results)

    async def _fail(self, items: Sequence[buffer_pb2.FailedSample]) -> Sequence[int]:
        request = buffer_pb2.FailRequest(worker=self._worker, failures=items)
        answer = await _insist(lambda: self._stub.Fail(request, timeout=CALL_SECONDS))
        if len(answer.decisions) != len(items):
            raise Internal(f"{len(items)} failures, {len(answer.decisions)} decisions", where="Buffer.Fail")
        return list(answer.decisions)


async def _insist(call: Callable[[], Awaitable[Answer]]) -> Answer:
    end = time.monotonic() + GIVE_UP_S
    attempt = 0
    while True:
        try:
            return await call()
        except (NotReady, TimedOut):
            pause = backoff(attempt)
            if time.monotonic() + pause > end:
                raise
        await asyncio.sleep(pause)
        attempt += 1


def _chunks(data: bytes) -> Iterator[types_pb2.Chunk]:
    pieces = list(split(data))
    for index, piece in enumerate(pieces):
        yield types_pb2.Chunk(data=piece, last=index == len(pieces) - 1)
