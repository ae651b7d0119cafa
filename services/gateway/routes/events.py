"""A run's events as server-sent events.

Each has its sequence number as id, so that a client that comes back with ``Last-Event-ID`` misses nothing.
The stream closes with an event ``end`` once the run has ended; a client that comes back then is told 204,
which ends its reconnecting. When the controller goes away the stream closes with an event ``problem``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from protos.headrace.v1 import runs_pb2
from services.gateway.requests import RunId, ThePeers, TheStreams
from services.gateway.streams import Streams
from services.gateway.wire import numbers
from services.runtime.errors import HeadraceError, InvalidInput, TimedOut

router = APIRouter(tags=["runs"])
ENDED = frozenset((runs_pb2.RUN_STATUS_COMPLETED, runs_pb2.RUN_STATUS_FAILED, runs_pb2.RUN_STATUS_CANCELLED))
WATCH_SECONDS = 3600.0
SEND_SECONDS = 30.0


@router.get(
    "/runs/{run}/events",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events."},
        204: {"description": "The run has ended and all its events were sent."},
    },
)
async def events(
    run: RunId,
    peers: ThePeers,
    streams: TheStreams,
    from_sequence: Annotated[int, Query(ge=0, lt=2**63, description="First event wanted.")] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Events of a run from `from_sequence` on, or after `Last-Event-ID`, until it ends."""
    first = _first(from_sequence, last_event_id)
    ended = (await peers.runs.Get(runs_pb2.GetRunRequest(run=run))).status in ENDED
    if ended and last_event_id and not await _any(peers, run, first):
        return Response(status_code=204)
    streams.check()
    source = peers.runs.Watch(runs_pb2.WatchRunRequest(run=run, from_sequence=first), timeout=WATCH_SECONDS)
    return EventSourceResponse(_events(source, streams), ping=streams.ping_seconds, send_timeout=SEND_SECONDS)


def _first(from_sequence: int, last_event_id: str | None) -> int:
    if not last_event_id:
        return from_sequence
    if not last_event_id.isdecimal() or len(last_event_id) > 18:
        raise InvalidInput("Last-Event-ID is no sequence number", where="Last-Event-ID")
    return int(last_event_id) + 1


async def _any(peers: Any, run: str, first: int) -> bool:
    """Whether an ended run has an event from ``first`` on."""
    request = runs_pb2.WatchRunRequest(run=run, from_sequence=first)
    async with peers.runs.Watch(request, timeout=10) as found:
        return await anext(found, None) is not None


async def _events(source: Any, streams: Streams) -> AsyncIterator[ServerSentEvent]:
    try:
        async for event in streams.until_closed(source):
            yield _shown(event)
    except TimedOut:
        return  # the client comes back with Last-Event-ID
    except HeadraceError as exc:
        told = {"reason": exc.reason, "detail": exc.message, "where": exc.where, "do": exc.do}
        yield ServerSentEvent(event="problem", data=json.dumps(told))
        return
    if not streams.closing:
        yield ServerSentEvent(event="end", data="{}")


def _shown(event: runs_pb2.RunEvent) -> ServerSentEvent:
    data = {
        "sequence": event.sequence, "at": event.at_ns / 1e9, "kind": event.kind, "step": event.step,
        "text": event.text, "values": numbers(event.values),
    }  # fmt: skip
    return ServerSentEvent(id=str(event.sequence), event=event.kind, data=json.dumps(data))
