"""gRPC face of the bridge.

Invariants
- Setup and Publish carry an epoch; older ones than the newest seen are refused.
- A publish that has begun ends by itself, even when its caller has gone: engines are never left in between
  because a client hung up. A caller that comes back finds it committed, or waits for it.
- Engines may register before there is a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import redis.asyncio as redis_async

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc
from refit_bridge.cycle import ProbeSettings, RouterGate
from refit_bridge.late import LateSync
from refit_bridge.ledger import VersionLedger
from refit_bridge.publish import Publisher, RunState
from refit_bridge.roster import Roster
from refit_bridge.settings import RefitSettings
from services.runtime.errors import Fenced, InvalidInput, NotReady, Unsupported

TRANSPORTS = ("shm",)
DEFAULT_LIMIT = 50
TRAIN_BOOK = "train"

Context = grpc.aio.ServicerContext[Any, Any]


class RefitServicer(refit_pb2_grpc.RefitServicer):
    """Holds the current run; everything else is the business of roster, publisher and ledger."""

    def __init__(
        self,
        settings: RefitSettings,
        client: redis_async.Redis,
        roster: Roster,
        publisher: Publisher,
        gate: RouterGate,
    ) -> None:
        self._settings = settings
        self._client = client
        self._roster = roster
        self._publisher = publisher
        self._gate = gate
        self._state: RunState | None = None
        self._publishes: set[asyncio.Task[refit_pb2.PublishResponse]] = set()
        self.late = LateSync(roster, publisher, lambda: self._state, settings.sync_retry_seconds)

    async def Setup(
        self, request: refit_pb2.RefitSetupRequest, context: Context
    ) -> refit_pb2.RefitSetupResponse:
        """Take a run over, or its changed settings; a repeat changes nothing."""
        _check_setup(request)
        state = self._state
        if state is not None and state.run == request.run:
            await self._fence(state, request.fence.epoch)
            state.transport = request.transport
            state.min_engines = max(1, request.min_engines)
            state.probe = _probe_settings(request)
            state.in_flight, state.recompute_kv_cache = request.in_flight, request.recompute_kv_cache
        else:
            async with self.late.held():
                await self._begin(request)
        return refit_pb2.RefitSetupResponse()

    async def RegisterEngine(
        self, request: refit_pb2.RegisterEngineRequest, context: Context
    ) -> refit_pb2.RegisterEngineResponse:
        """Registration and heartbeat."""
        if not request.info.engine or not request.info.address:
            raise InvalidInput("An engine registers with its id and its address", where="info")
        await self._roster.register(request.info)
        return refit_pb2.RegisterEngineResponse(heartbeat_s=self._settings.heartbeat_seconds)

    async def DeregisterEngine(
        self, request: refit_pb2.DeregisterEngineRequest, context: Context
    ) -> refit_pb2.DeregisterEngineResponse:
        """An engine says goodbye."""
        await self._roster.deregister(request.engine, request.reason)
        return refit_pb2.DeregisterEngineResponse()

    async def WatchRoster(
        self, request: refit_pb2.WatchRosterRequest, context: Context
    ) -> AsyncIterator[refit_pb2.Roster]:
        """The roster now and after each change, until the caller or the service ends it."""
        async for roster in self._roster.watch():
            yield roster

    async def Publish(self, request: refit_pb2.PublishRequest, context: Context) -> refit_pb2.PublishResponse:
        """Commit a version."""
        state = self._current(request.run)
        await self._fence(state, request.fence.epoch)
        task = asyncio.create_task(self._publish(request))
        self._publishes.add(task)
        task.add_done_callback(self._publishes.discard)
        return await asyncio.shield(task)

    async def LeaseEngines(
        self, request: refit_pb2.LeaseEnginesRequest, context: Context
    ) -> refit_pb2.LeaseEnginesResponse:
        """Set engines aside for a book."""
        state = self._current(request.run)
        await self._fence(state, request.fence.epoch)
        if not request.book or request.book == TRAIN_BOOK:
            raise InvalidInput(f"Engines are not set aside for book {request.book!r}", where="book")
        taken = await self._roster.lease(request.book, max(1, request.engines), keep=state.min_engines)
        version = taken[0].committed if taken else None
        return refit_pb2.LeaseEnginesResponse(engines=[m.engine for m in taken], version=version)

    async def ReleaseEngines(
        self, request: refit_pb2.ReleaseEnginesRequest, context: Context
    ) -> refit_pb2.ReleaseEnginesResponse:
        """Give the engines of a book back; the background sync brings them up."""
        self._current(request.run)
        if not request.book:
            raise InvalidInput("Names no book", where="book")
        await self._roster.release(request.book)
        return refit_pb2.ReleaseEnginesResponse()

    async def ListVersions(
        self, request: refit_pb2.ListVersionsRequest, context: Context
    ) -> refit_pb2.ListVersionsResponse:
        """The ledger, newest first; also of runs that have ended."""
        ledger = VersionLedger(self._client, request.run)
        return refit_pb2.ListVersionsResponse(versions=await ledger.versions(request.limit or DEFAULT_LIMIT))

    async def stop(self) -> None:
        """End what runs in the background."""
        for task in self._publishes:
            task.cancel()
        await asyncio.gather(*self._publishes, return_exceptions=True)
        await self.late.stop()

    async def _publish(self, request: refit_pb2.PublishRequest) -> refit_pb2.PublishResponse:
        async with self.late.held():
            # Asked again: another run may have been set up while this waited its turn.
            state = self._current(request.run)
            await self._fence(state, request.fence.epoch)
            return await self._publisher.publish(state, request.version, request.fence.step)

    async def _begin(self, request: refit_pb2.RefitSetupRequest) -> None:
        ledger = VersionLedger(self._client, request.run)
        await ledger.fence(request.fence.epoch)
        committed = await ledger.committed()
        self._state = RunState(
            run=request.run,
            epoch=request.fence.epoch,
            transport=request.transport,
            min_engines=max(1, request.min_engines),
            probe=_probe_settings(request),
            in_flight=request.in_flight,
            recompute_kv_cache=request.recompute_kv_cache,
            ledger=ledger,
            committed=committed,
            plan=await ledger.plan(),
        )
        self._gate.run = request.run
        await self._roster.begin_run(request.run, committed.version if committed else None)

    def _current(self, run: str) -> RunState:
        if self._state is None or self._state.run != run:
            raise NotReady(
                f"The bridge is not set up for run {run}", where="refit", do="Call Setup.", reason="NO_RUN"
            )
        return self._state

    async def _fence(self, state: RunState, epoch: int) -> None:
        if epoch < state.epoch:
            raise Fenced(f"Epoch {epoch} is older than {state.epoch}", where=f"run {state.run}")
        if epoch > state.epoch:
            await state.ledger.fence(epoch)
            state.epoch = epoch
            # Whoever set engines aside is no more: nobody would give them back.
            await self._roster.release()


def _check_setup(request: refit_pb2.RefitSetupRequest) -> None:
    if not request.run:
        raise InvalidInput("Setup names no run", where="run")
    if request.transport not in TRANSPORTS:
        raise Unsupported(
            f"Transport {request.transport!r} does not exist",
            where="transport",
            do=f"Use {', '.join(TRANSPORTS)}.",
        )
    if any(len(ids) % 4 or not ids for ids in request.probe_sequences):
        raise InvalidInput("A probe sequence is no int32 sequence", where="probe_sequences")


def _probe_settings(request: refit_pb2.RefitSetupRequest) -> ProbeSettings:
    return ProbeSettings(
        sequences=tuple(request.probe_sequences),
        temperature=request.probe_temperature,
        tolerance=request.probe_tolerance,
    )
