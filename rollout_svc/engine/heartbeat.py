"""Keeps the engine in the bridge's roster, on behalf of its worker.

Invariants: what is registered is the worker's own info once it serves, and before that an info of the same
engine id with the host's address, through which it can be set up; a bridge that is down costs log lines only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, rollout_pb2
from services.runtime import rpc
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger

CALL_SECONDS = 2.0


class Heartbeat:
    """Registers ``describe()`` every ``seconds`` (or as the bridge asks), and at once on a change."""

    def __init__(
        self, refit: str, describe: Callable[[], rollout_pb2.EngineInfo | None], seconds: float
    ) -> None:
        self._channel = rpc.connect(refit, name="refit")
        self._stub = refit_pb2_grpc.RefitStub(self._channel)
        self._describe = describe
        self._seconds = seconds
        self._wake = asyncio.Event()
        self._leaving: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._log = get_logger("engine")
        self._reached = True

    def start(self) -> None:
        """Begin to register."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    def changed(self) -> None:
        """Register now."""
        self._wake.set()

    def left(self, engine: str, reason: str) -> None:
        """Take ``engine`` out of the roster; it will not come back."""
        self._leaving.put_nowait((engine, reason))
        self._wake.set()

    async def stop(self) -> None:
        """Deregister and end; bounded by one call."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if (info := self._describe()) is not None:
            self.left(info.engine, "its host has been stopped")
        await self._leave()
        await self._channel.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._leave()
            await self._register()
            try:
                await asyncio.wait_for(self._wake.wait(), self._seconds)
            except TimeoutError:
                continue

    async def _register(self) -> None:
        info = self._describe()
        if info is None:
            return
        request = refit_pb2.RegisterEngineRequest(info=info)
        try:
            answer = await self._stub.RegisterEngine(request, timeout=CALL_SECONDS)
        except HeadraceError as exc:
            self._lost(exc)
            return
        if not self._reached:
            self._log.info("refit bridge reached again")
        self._reached = True
        self._seconds = answer.heartbeat_s or self._seconds

    async def _leave(self) -> None:
        while not self._leaving.empty():
            engine, reason = self._leaving.get_nowait()
            request = refit_pb2.DeregisterEngineRequest(engine=engine, reason=reason)
            try:
                await self._stub.DeregisterEngine(request, timeout=CALL_SECONDS)
            except HeadraceError as exc:
                # Its heartbeats have stopped; the bridge will find out by itself.
                self._lost(exc)

    def _lost(self, exc: HeadraceError) -> None:
        if self._reached:
            self._log.warning("refit bridge not reached", error=str(exc))
        self._reached = False
