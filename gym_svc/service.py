"""The gym service: a worker for the run that the stack's assignment names.

Invariants
- One run at a time. A worker follows the assignment that the buffer tells; nobody has to know the workers.
- ``Setup`` pins it to a run by hand: it follows again after ``Release``.
- Setup and Release are idempotent: a repeated Setup of the same run and env changes nothing.
- What changes the run is serialised.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import Any

import grpc.aio

from gym_svc.agent.registry import AGENTS
from gym_svc.config import parse_env
from gym_svc.follow import Follower
from gym_svc.settings import GymSettings
from gym_svc.worker import Stubs, Worker
from protos.headrace.v1 import (
    buffer_pb2,
    buffer_pb2_grpc,
    gym_pb2,
    gym_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
)  # fmt: skip
from services.runtime import rpc
from services.runtime.errors import InvalidInput
from services.runtime.logs import get_logger
from services.runtime.service import ServiceApp, serve

SERVICE = "headrace.v1.Gym"
# Release has 60 s; what is not done by then is given back.
RELEASE_DRAIN_S = 10.0


class GymApp(ServiceApp, gym_pb2_grpc.GymServicer):
    """The service."""

    name = "gym"

    def __init__(self, settings: GymSettings) -> None:
        self._settings = settings
        self._worker: Worker | None = None
        self._given: tuple[str, str, int] | None = None
        self._pinned = False
        self._assigned: buffer_pb2.GymAssignment | None = None
        self._follow: asyncio.Task[None] | None = None
        self._change = asyncio.Lock()
        self._id = f"gym-{os.getpid()}-{secrets.token_hex(3)}"
        self._log = get_logger("gym")

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """See ServiceApp."""
        gym_pb2_grpc.add_GymServicer_to_server(self, server)
        return [SERVICE]

    async def start(self) -> None:
        """Begin to follow the assignment."""
        buffer = rpc.stub(buffer_pb2_grpc.BufferStub, self._settings.buffer, name="buffer")
        self._follow = asyncio.create_task(Follower(buffer, self._take).forever(), name="assignment")

    async def draining(self) -> None:
        """Follow no more; finish or give back what is in flight."""
        if self._follow is not None:
            self._follow.cancel()
            await asyncio.wait([self._follow])
        async with self._change:
            # Some time is left for giving back, before the runtime's own limit cuts this hook.
            await self._end(max(0.0, self._settings.drain_seconds - 3.0))

    async def stop(self) -> None:
        """See ServiceApp."""
        await rpc.close_channels()

    async def Setup(self, request: gym_pb2.GymSetupRequest, context: Any) -> gym_pb2.GymSetupResponse:
        """Pin this worker to ``request.run``."""
        if not request.run:
            raise InvalidInput("run is empty", where="Gym.Setup")
        async with self._change:
            await self._work_for(request.run, request.env_json, request.concurrency)
            self._pinned = True
            assert self._worker is not None, "set by _work_for"
            names = self._worker.planner.environments
        return gym_pb2.GymSetupResponse(agents=sorted(AGENTS), environments=names)

    async def Release(self, request: gym_pb2.GymReleaseRequest, context: Any) -> gym_pb2.GymReleaseResponse:
        """Stop claiming samples of ``request.run``, and follow the assignment again."""
        async with self._change:
            if self._worker is not None and self._worker.run == request.run:
                await self._end(RELEASE_DRAIN_S)
            if self._pinned and self._worker is None:
                self._pinned = False
                if self._assigned is not None and self._assigned.run != request.run:
                    await self._carry_out(self._assigned)
        return gym_pb2.GymReleaseResponse()

    async def _take(self, assigned: buffer_pb2.GymAssignment | None) -> None:
        """The stack's assignment has changed."""
        async with self._change:
            self._assigned = assigned
            if self._pinned:
                return
            if assigned is not None:
                await self._carry_out(assigned)
            elif self._worker is not None:
                await self._end(RELEASE_DRAIN_S)

    async def _carry_out(self, assigned: buffer_pb2.GymAssignment) -> None:
        await self._work_for(assigned.run, assigned.env_json, assigned.concurrency)

    async def _work_for(self, run: str, env_json: str, concurrency: int) -> None:
        given = (run, env_json, concurrency)
        if self._worker is not None and self._given == given:
            return
        worker = self._new_worker(run, env_json, concurrency)
        await self._end(RELEASE_DRAIN_S)
        worker.start()
        self._worker, self._given = worker, given
        self._log.info("set up", run=run, worker=self._id, concurrency=worker.concurrency)

    async def Status(self, request: gym_pb2.GymStatusRequest, context: Any) -> gym_pb2.GymStatusResponse:
        """What this worker does now."""
        worker = self._worker
        if worker is None:
            return gym_pb2.GymStatusResponse(worker=self._id)
        return gym_pb2.GymStatusResponse(
            run=worker.run, worker=self._id, in_flight=worker.in_flight, completed=worker.completed,
            failed=worker.failed,
        )  # fmt: skip

    def _new_worker(self, run: str, env_json: str, concurrency: int) -> Worker:
        settings = self._settings
        stubs = Stubs(
            buffer=rpc.stub(buffer_pb2_grpc.BufferStub, settings.buffer, name="buffer"),
            rollout=rpc.stub(rollout_pb2_grpc.RolloutStub, settings.rollout, name="rollout"),
            reward=rpc.stub(reward_pb2_grpc.RewardsStub, settings.reward, name="reward"),
        )
        env = parse_env(env_json)
        return Worker(run, env, stubs, name=self._id, concurrency=concurrency or settings.concurrency)

    async def _end(self, drain_seconds: float) -> None:
        worker, self._worker, self._given = self._worker, None, None
        if worker is not None:
            await worker.stop(drain_seconds)
            self._log.info("released", run=worker.run, completed=worker.completed, failed=worker.failed)


def main() -> int:
    """``headrace serve gym``."""
    settings = GymSettings.load()
    return serve(GymApp(settings), settings)
