"""One engine as the router sees it: channel, gate, load.

Invariants
- ``in_flight`` counts turns that were sent and not answered; it never drops below zero and ends at zero.
- A closed gate lets nothing new through; what is in flight goes on.
- A call is made once: the router chooses where it is repeated.
- An engine that has left the roster may finish its turns for a while; what is late is NotReady, not cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from protos.headrace.v1 import refit_pb2, rollout_pb2_grpc
from services.runtime.calls import call_metadata
from services.runtime.errors import NotReady, from_rpc_error
from services.runtime.rpc import channel_options

AVOID_SECONDS = 1.0
LEAVE_SECONDS = 30.0
"""More than an engine takes to drain: it ends its turns itself."""


class RoutedEngine:
    """An engine of the roster; ``entry`` is its newest roster entry."""

    def __init__(self, entry: refit_pb2.RosterEntry) -> None:
        self.entry = entry
        self.open = True
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._avoid_until = 0.0
        self._channels: list[grpc.aio.Channel] = []
        self._address = ""
        self._stub: Any = None
        self._closed = False

    @property
    def id(self) -> str:
        """The engine's id: one life of one process."""
        return self.entry.info.engine

    def serves(self, run: str) -> bool:
        """Whether turns of ``run`` may go there now, its gate apart."""
        return (
            self.entry.state == refit_pb2.ENGINE_STATE_SERVING
            and self.entry.info.run == run
            and time.monotonic() >= self._avoid_until
        )

    def renders(self, run: str) -> bool:
        """Whether it can render for ``run``: any engine that was set up for it."""
        info = self.entry.info
        lost = self.entry.state == refit_pb2.ENGINE_STATE_LOST
        return info.ready and info.run == run and not lost and time.monotonic() >= self._avoid_until

    def set_aside_for(self, book: str) -> bool:
        """Whether it answers turns of this book only."""
        return self.entry.book == book and self.entry.state != refit_pb2.ENGINE_STATE_LOST

    def avoid(self) -> None:
        """Send nothing there for a moment: its process has just failed a call."""
        self._avoid_until = time.monotonic() + AVOID_SECONDS

    @contextmanager
    def flight(self) -> Iterator[None]:
        """Counts one turn."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def drained(self, timeout: float) -> int:
        """Wait until nothing is in flight, at most ``timeout`` seconds; the turns that still are."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return self.in_flight
        return 0

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """Call ``method`` of the engine once; raises the tree's errors."""
        metadata = call_metadata()
        try:
            return await getattr(self._connected(), method)(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, where=f"{self.id} at {self._address}, {method}") from exc
        except asyncio.CancelledError:
            # A closed channel cancels its calls in the same way as somebody who cancels the caller.
            if not self._closed or _cancelled():
                raise
            raise NotReady("The engine has left", where=self.id, reason="ENGINE_GONE") from None

    async def close(self, seconds: float | None = None) -> None:
        """Close the channels once nothing is in flight, at the latest after ``seconds``."""
        await self.drained(LEAVE_SECONDS if seconds is None else seconds)
        self._closed = True
        for channel in self._channels:
            await channel.close(None)
        self._channels.clear()

    def _connected(self) -> Any:
        address = self.entry.info.address
        if address != self._address:
            # It changes once, from the host's to the worker's; what is in flight keeps its channel.
            self._channels.append(grpc.aio.insecure_channel(address, options=channel_options()))
            self._stub = rollout_pb2_grpc.EngineStub(self._channels[-1])
            self._address = address
        return self._stub


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
