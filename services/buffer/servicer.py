"""The Buffer service over gRPC: long polls, spans and frames around the store.

Invariants: a wait ends before the caller's deadline; a run gets upkeep once a call about it has succeeded;
each appended trajectory has a span of its own, whose parent is the trajectory's trace context (the call's
metadata can carry only one, and a batch has many).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from protos.headrace.v1.buffer_pb2_grpc import BufferServicer
from services.buffer import keys
from services.buffer.assignment import Assignments
from services.buffer.fetch import fetch
from services.buffer.listing import Listing
from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions
from services.buffer.upkeep import Upkeep
from services.buffer.waiting import until
from services.runtime import metrics, tracing
from services.runtime.chunks import split
from services.runtime.errors import Exhausted, InvalidInput

MARGIN_SECONDS = 0.5
MAX_WAIT_SECONDS = 60.0
MAX_CLAIM = 1024
MAX_APPEND_BYTES = 1 << 30
Result = TypeVar("Result")
_STATUS: dict[int, dict[str, str]] = {
    value: {"status": name.removeprefix("APPEND_STATUS_").lower()} for name, value in pb.AppendStatus.items()
}


class Buffer(BufferServicer):
    """One replica's answers; all state is in Redis."""

    def __init__(
        self, transitions: Transitions, store: Store, steps: Steps, upkeep: Upkeep, assignments: Assignments
    ) -> None:
        self._do, self._store, self._steps, self._upkeep = transitions, store, steps, upkeep
        self._assignments = assignments
        self._listing = Listing(transitions)

    async def Setup(self, request: pb.BufferSetupRequest, context: Any) -> pb.BufferSetupResponse:
        """Make a run known, and the work of its stack."""
        await self._store.setup(request)
        self._upkeep.of(request.run)
        if request.HasField("gym"):
            await self._assignments.assign(request.gym)
            self._upkeep.assigned.ring()
            return pb.BufferSetupResponse(gym_refusal=await self._assignments.refusal())
        return pb.BufferSetupResponse()

    async def OpenGroups(self, request: pb.OpenGroupsRequest, context: Any) -> pb.OpenGroupsResponse:
        """Dispatch."""
        opened, existing = await self._store.open_groups(request)
        if opened:
            self._upkeep.of(request.run).work.ring()
        return pb.OpenGroupsResponse(opened=opened, existing=existing)

    async def Claim(self, request: pb.ClaimRequest, context: Any) -> pb.ClaimResponse:
        """Hand out samples; waits while there is none."""
        if not request.worker or not request.max_samples:
            raise InvalidInput("A claim needs a worker and samples", where="worker, max_samples")
        most = min(request.max_samples, MAX_CLAIM)

        async def look() -> list[pb.Work]:
            return await self._store.claim(request.run, request.worker, most)

        work = await look()
        bell = self._upkeep.of(request.run).work
        if not work and request.wait_s > 0:
            work = await until(look, bool, bell, _wait(request.wait_s, context))
        return pb.ClaimResponse(work=work)

    async def Assignment(self, request: pb.AssignmentRequest, context: Any) -> pb.AssignmentResponse:
        """What to work for; waits while that is what the caller knows."""

        def news(seen: pb.AssignmentResponse) -> bool:
            return seen.serial != request.known_serial

        if request.refusal:
            await self._assignments.refused(request.known_serial, request.refusal)
        bell = self._upkeep.assigned
        return await until(self._assignments.now, news, bell, _wait(request.wait_s, context))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """The run needs its stack's workers no more."""
        await self._assignments.release(request.run)
        self._upkeep.assigned.ring()
        return pb.ReleaseResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Keep claims alive."""
        lost = await self._store.heartbeat(request.run, request.worker, request.claims)
        self._upkeep.of(request.run)
        return pb.HeartbeatResponse(lost=lost)

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        """Store finished trajectories."""
        return await self._append(request)

    async def AppendStream(
        self, request_iterator: AsyncIterator[types.Chunk], context: Any
    ) -> pb.AppendResponse:
        """The same in chunks."""
        return await self._append(await _joined(request_iterator))

    async def Fail(self, request: pb.FailRequest, context: Any) -> pb.FailResponse:
        """Retry or drop samples without a trajectory."""
        runs = _by_run([failure.ref.key.run for failure in request.failures])
        decisions: dict[int, pb.FailDecision.ValueType] = {}
        for run, places in runs.items():
            found = await self._store.fail(run, [request.failures[at] for at in places])
            decisions.update(zip(places, found, strict=True))
            self._ring(run)
        return pb.FailResponse(decisions=[decisions[at] for at in range(len(request.failures))])

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:
        """The step's manifest; waits until it is complete or lacks groups."""
        first = await self._steps.lease(request)
        if _settled(first) or not request.wait_s:
            return first
        bell = self._upkeep.of(request.run).books

        async def look() -> pb.LeaseResponse:
            return await self._steps.lease(request)

        return await until(look, _settled, bell, _wait(request.wait_s, context))

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[types.Chunk]:
        """Stream trajectories group by group."""
        await self._do.require(request.run)
        groups = fetch(self._do, request.run, keys.checked_book(request.book), request.groups)
        async for group in groups:
            parts = list(split(group))
            for number, part in enumerate(parts, start=1):
                yield types.Chunk(data=part, last=number == len(parts))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        """leased -> trained."""
        groups, samples = await self._changed(request.run, self._steps.commit(request.run, request.fence))
        return pb.CommitResponse(groups=groups, samples=samples)

    async def MarkDurable(self, request: pb.MarkDurableRequest, context: Any) -> pb.MarkDurableResponse:
        """trained -> durable."""
        groups = await self._changed(request.run, self._steps.mark_durable(request.run, request.fence))
        return pb.MarkDurableResponse(groups=groups)

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreResponse:
        """Later steps are ready again."""
        restored = self._steps.restore(request.run, request.fence, request.completed_steps)
        return pb.RestoreResponse(groups=await self._changed(request.run, restored))

    async def DropOpen(self, request: pb.DropOpenRequest, context: Any) -> pb.DropOpenResponse:
        """Drop what is open."""
        dropped = self._steps.drop_open(request.run, request.book, request.reason)
        return pb.DropOpenResponse(groups=await self._changed(request.run, dropped))

    async def Progress(self, request: pb.ProgressRequest, context: Any) -> pb.ProgressResponse:
        """Counts; waits while samples are queued or claimed."""

        async def look() -> pb.ProgressResponse:
            return await self._steps.progress(request.run, request.book)

        def idle(seen: pb.ProgressResponse) -> bool:
            return not seen.samples_queued and not seen.samples_claimed

        await self._do.require(request.run)
        bell = self._upkeep.of(request.run).books
        return await until(look, idle, bell, _wait(request.wait_s, context))

    async def CloseBook(self, request: pb.CloseBookRequest, context: Any) -> pb.CloseBookResponse:
        """Results of a validation book."""
        return await self._changed(request.run, self._steps.close_book(request.run, request.book))

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Any) -> pb.ListGroupsResponse:
        """Groups for people."""
        return pb.ListGroupsResponse(groups=await self._listing.page(request))

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Any
    ) -> pb.ListDeadLettersResponse:
        """Samples that were given up."""
        return pb.ListDeadLettersResponse(letters=await self._steps.dead_letters(request.run, request.limit))

    async def _append(self, request: pb.AppendRequest) -> pb.AppendResponse:
        results: list[pb.AppendResult] = [pb.AppendResult()] * len(request.trajectories)
        for run, places in _by_run([trajectory.key.run for trajectory in request.trajectories]).items():
            batch = [request.trajectories[at] for at in places]
            with ExitStack() as stack:
                spans = [stack.enter_context(_span(trajectory)) for trajectory in batch]
                found = await self._store.append(run, batch)
                _describe(spans, found)
            for at, result in zip(places, found, strict=True):
                results[at] = result
                metrics.buffer_appended.add(1, _STATUS[result.status])
            self._ring(run)
        return pb.AppendResponse(results=results)

    async def _changed(self, run: str, transition: Awaitable[Result]) -> Result:
        result = await transition
        self._upkeep.of(run).books.ring()
        return result

    def _ring(self, run: str) -> None:
        upkeep = self._upkeep.of(run)
        upkeep.work.ring()
        upkeep.books.ring()


def _span(trajectory: types.Trajectory) -> Any:
    key = trajectory.key
    attributes: dict[str, AttributeValue] = {
        "headrace.run": key.run,
        "headrace.book": key.book,
        "headrace.group": str(key.group),
        "headrace.sample": str(key.sample),
        "headrace.attempt": trajectory.attempt,
    }
    parent = tracing.context_from(trajectory.trace.traceparent)
    # Not the current span: a trajectory without a trace belongs to the call.
    return tracing.span("buffer.append", parent=parent, attributes=attributes)


def _describe(spans: Sequence[Span], results: Sequence[pb.AppendResult]) -> None:
    for span, result in zip(spans, results, strict=True):
        name = pb.AppendStatus.Name(result.status)
        span.set_attribute("headrace.append.status", name.removeprefix("APPEND_STATUS_").lower())


async def _joined(chunks: AsyncIterator[types.Chunk]) -> pb.AppendRequest:
    data = bytearray()
    last = False
    async for chunk in chunks:
        data += chunk.data
        last = chunk.last
        if len(data) > MAX_APPEND_BYTES:
            raise Exhausted(
                f"An append is larger than {MAX_APPEND_BYTES} bytes", do="Send fewer trajectories."
            )
    if not last:
        raise InvalidInput("The stream ended before its last chunk", where="AppendStream")
    try:
        return pb.AppendRequest.FromString(bytes(data))
    except DecodeError as exc:
        raise InvalidInput("The chunks are no AppendRequest", where="AppendStream") from exc


def _by_run(runs: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        places[run].append(at)
    return places


def _settled(response: pb.LeaseResponse) -> bool:
    """Waiting longer cannot help: the manifest is there, or groups must be dispatched first."""
    return response.HasField("manifest") or response.missing > 0


def _wait(seconds: float, context: Any) -> float:
    left = context.time_remaining()
    most = MAX_WAIT_SECONDS if left is None else left - MARGIN_SECONDS
    return max(0.0, min(seconds, most, MAX_WAIT_SECONDS))
