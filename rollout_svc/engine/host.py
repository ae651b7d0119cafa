"""The host's gRPC service: takes Setup and answers for a worker that is not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import grpc.aio

from protos.headrace.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_svc.engine.heartbeat import Heartbeat
from rollout_svc.engine.lines import Assignment
from rollout_svc.engine.pool import WorkerPool
from rollout_svc.engine.settings import EngineSettings
from services.runtime.errors import NotReady
from services.runtime.service import ServiceApp

ENGINE_SERVICE = "headrace.v1.Engine"


class EngineHost(ServiceApp, rollout_pb2_grpc.EngineServicer):
    """Serves Setup and Describe; every other call belongs to the worker's own address.

    ``settings.listen`` names a port: it is the address in the roster until the worker serves.
    """

    name: ClassVar[str] = "engine"

    measured_here = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._address = settings.reachable(settings.listen)
        self.pool: WorkerPool | None = None
        self._heartbeat: Heartbeat | None = None

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Serve Engine."""
        rollout_pb2_grpc.add_EngineServicer_to_server(self, server)
        return (ENGINE_SERVICE,)

    async def start(self) -> None:
        """Start the worker and register it."""
        self._heartbeat = Heartbeat(self._settings.refit, self.describe, self._settings.heartbeat_seconds)
        self.pool = WorkerPool(self._settings, self._heartbeat.left, self.fail)
        await self.pool.start()
        self._heartbeat.start()

    async def draining(self) -> None:
        """Leave the roster first: from now on nobody sends turns here."""
        if self._heartbeat is not None:
            await self._heartbeat.stop()

    async def stop(self) -> None:
        """End the worker once its turns have finished, or its drain is over."""
        if self.pool is not None:
            await self.pool.stop(self._settings.drain_seconds)

    def describe(self) -> rollout_pb2.EngineInfo | None:
        """What to register: the worker's info, or a place-holder of the same id; None between two workers."""
        if self.pool is None:
            return None
        try:
            worker = self.pool.worker
        except NotReady:
            return None
        if worker.info is not None:
            return worker.info
        return rollout_pb2.EngineInfo(
            engine=worker.engine, name=self._settings.backend, address=self._address
        )

    async def Setup(self, request: rollout_pb2.EngineSetupRequest, context: Any) -> rollout_pb2.EngineInfo:
        """Hand the run to the worker and wait until it serves."""
        if self.pool is None or self._heartbeat is None:
            raise NotReady("The engine is starting")
        info = await self.pool.setup(Assignment.of(request))
        self._heartbeat.changed()
        return info

    async def Describe(self, request: Any, context: Any) -> rollout_pb2.EngineInfo:
        """The engine as it is registered."""
        info = self.describe()
        if info is None:
            raise NotReady("The engine's worker is being started")
        return info

    async def _not_here(self, request: Any, context: Any) -> Any:
        raise NotReady(
            "The engine has not been set up", where=self._address, do="Call its Setup.", reason="NO_RUN"
        )

    Turn = Render = Score = Pause = Resume = _not_here
    BeginUpdate = LoadWeights = FinishUpdate = CommitVersion = _not_here
