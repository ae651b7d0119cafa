"""The controller process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from services.controller.scheduler import Scheduler
from services.controller.servicer import RunsServicer
from services.controller.settings import ControllerSettings
from services.runtime import redis, rpc
from services.runtime.errors import HeadraceError
from services.runtime.service import ServiceApp, serve


class ControllerApp(ServiceApp):
    """Holds Redis, serves Runs, and drives runs in a task of its own."""

    name = "controller"

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._handle: redis.RedisHandle | None = None
        self._client: Any = None
        self._scheduler: Scheduler | None = None
        self._task: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Hold Redis and add the servicer."""
        self._handle = redis.acquire(self._settings.home, self._settings.redis_url)
        self._client = redis.connect(self._handle.url)
        self._scheduler = Scheduler(self._settings, self._client)
        servicer = RunsServicer(self._settings, self._scheduler, self._client)
        runs_pb2_grpc.add_RunsServicer_to_server(servicer, server)
        return [runs_pb2.DESCRIPTOR.services_by_name["Runs"].full_name]

    async def start(self) -> None:
        """Begin to drive runs."""
        assert self._scheduler is not None
        self._task = asyncio.create_task(self._scheduler.forever())

    def readiness(self) -> tuple[bool, str]:
        """Ready while the scheduler lives."""
        if self._task is not None and self._task.done():
            return False, "the scheduler has ended"
        return True, ""

    async def stop(self) -> None:
        """Stop driving; the run stays as it is, for the next controller."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await rpc.close_channels()
        if self._client is not None:
            await self._client.aclose()
        if self._handle is not None:
            self._handle.close()


def main() -> int:
    """``headrace serve controller``."""
    try:
        settings = ControllerSettings.load()
    except HeadraceError as exc:
        print(f"controller: {exc}")
        return 2
    return serve(ControllerApp(settings), settings)
