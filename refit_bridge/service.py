"""The refit bridge's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, trainer_pb2_grpc
from refit_bridge.cycle import RouterGate
from refit_bridge.publish import Publisher
from refit_bridge.roster import Roster
from refit_bridge.servicer import RefitServicer
from refit_bridge.settings import RefitSettings
from services.runtime import redis, rpc
from services.runtime.errors import HeadraceError
from services.runtime.service import ServiceApp, serve


class RefitApp(ServiceApp):
    """Holds Redis, serves Refit, and syncs late engines in a task of its own."""

    name = "refit"

    def __init__(self, settings: RefitSettings) -> None:
        self._settings = settings
        self._handle: redis.RedisHandle | None = None
        self._client: Any = None
        self._servicer: RefitServicer | None = None
        self._roster = Roster(lost_after=settings.lost_after_seconds)
        self._tasks: list[asyncio.Task[None]] = []

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Connect to Redis and add the servicer."""
        self._handle = redis.acquire(self._settings.home, self._settings.redis_url)
        self._client = redis.connect(self._handle.url)
        gate = RouterGate(self._settings.rollout, self._settings.drain_seconds_engine)
        trainer = rpc.stub(trainer_pb2_grpc.TrainerStub, self._settings.trainer, name="trainer")
        publisher = Publisher(self._roster, trainer, gate, self._settings)
        self._servicer = RefitServicer(self._settings, self._client, self._roster, publisher, gate)
        refit_pb2_grpc.add_RefitServicer_to_server(self._servicer, server)
        return [refit_pb2.DESCRIPTOR.services_by_name["Refit"].full_name]

    async def start(self) -> None:
        """Start watching engines and Redis."""
        assert self._servicer is not None
        assert self._handle is not None
        self._tasks = [
            asyncio.create_task(self._servicer.late.forever()),
            asyncio.create_task(self._handle.guard()),
        ]

    def readiness(self) -> tuple[bool, str]:
        """Not ready once a background task has ended."""
        if any(task.done() for task in self._tasks):
            return False, "a background task has ended"
        return True, ""

    async def draining(self) -> None:
        """End the watches."""
        await self._roster.close()

    async def stop(self) -> None:
        """End the background tasks and close connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._servicer is not None:
            await self._servicer.stop()
        await rpc.close_channels()
        if self._client is not None:
            await self._client.aclose()
        if self._handle is not None:
            self._handle.close()


def main() -> int:
    """``headrace serve refit``."""
    try:
        settings = RefitSettings.load()
    except HeadraceError as exc:
        print(f"refit: {exc}", file=sys.stderr)
        return 2
    return serve(RefitApp(settings), settings)


if __name__ == "__main__":
    raise SystemExit(main())
