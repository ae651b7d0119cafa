"""The buffer process: settings, Redis, servicer and upkeep under the common bootstrap.

Invariant: ready only while Redis answers; a replica keeps nothing that another one would miss.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import ClassVar

import grpc.aio

from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc
from services.buffer.assignment import Assignments
from services.buffer.servicer import Buffer
from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions
from services.buffer.upkeep import Upkeep
from services.runtime import redis as runtime_redis
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger
from services.runtime.redis_errors import translated
from services.runtime.service import ServiceApp, serve
from services.runtime.settings import ServiceSettings, service_config

PING_SECONDS = 1.0


class BufferSettings(ServiceSettings):
    """``HEADRACE_BUFFER_*``."""

    model_config = service_config("buffer")

    listen: str = "127.0.0.1:7001"
    redis_url: str | None = None
    """Redis to use; absent: the embedded one of the home."""
    stack: str = "default"
    """The stack whose gym workers this buffer serves; the same as its controller's."""


class BufferApp(ServiceApp):
    """One replica of the buffer."""

    name: ClassVar[str] = "buffer"

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._reachable = False
        self._tasks: list[asyncio.Task[None]] = []

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Connect (lazily) and add the servicer."""
        self._handle = runtime_redis.acquire(self._settings.home, self._settings.redis_url)
        self._redis = runtime_redis.connect(self._handle.url)
        transitions = Transitions(self._redis)
        store = Store(transitions)
        self._upkeep = Upkeep(transitions, store, f"{socket.gethostname()}-{os.getpid()}")
        assignments = Assignments(transitions, self._settings.stack)
        servicer = Buffer(transitions, store, Steps(transitions), self._upkeep, assignments)
        buffer_pb2_grpc.add_BufferServicer_to_server(servicer, server)
        return [buffer_pb2.DESCRIPTOR.services_by_name["Buffer"].full_name]

    async def start(self) -> None:
        """Check Redis and start the background tasks."""
        await self._ping()
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._guard()),
            asyncio.create_task(self._upkeep.sweep()),
        ]

    async def draining(self) -> None:
        """Answer the long polls."""
        self._upkeep.release_waits()

    async def stop(self) -> None:
        """End loops, close Redis."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._upkeep.close()
        await self._redis.aclose()
        self._handle.close()

    def readiness(self) -> tuple[bool, str]:
        """Ready while Redis answers."""
        return self._reachable, "" if self._reachable else "Redis does not answer"

    async def _guard(self) -> None:
        while True:
            try:
                await self._handle.guard()
            except HeadraceError as exc:
                get_logger(self.name).warning("redis is down", error=str(exc))
                await asyncio.sleep(PING_SECONDS)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self._ping()

    async def _ping(self) -> None:
        before = self._reachable
        try:
            with translated("buffer"):
                await self._redis.ping()
            self._reachable = True
        except HeadraceError:
            self._reachable = False
        if before != self._reachable:
            self.readiness_changed()


def main() -> int:
    """Serve one replica; returns the exit status."""
    try:
        settings = BufferSettings.load()
    except HeadraceError as exc:
        print(f"buffer: {exc}", file=sys.stderr)
        return 2
    return serve(BufferApp(settings), settings)
