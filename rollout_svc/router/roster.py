"""Follows the bridge's roster.

Invariant: a bridge that is down changes nothing; the last roster counts until a newer one arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc
from services.runtime import rpc
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger
from services.runtime.retry import backoff


class RosterWatch:
    """Calls ``on_roster`` with every roster until stopped."""

    def __init__(self, refit: str, on_roster: Callable[[refit_pb2.Roster], None]) -> None:
        self._channel = rpc.connect(refit, name="refit")
        self._stub = refit_pb2_grpc.RefitStub(self._channel)
        self._on_roster = on_roster
        self._task: asyncio.Task[None] | None = None
        self._log = get_logger("rollout")

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="roster watch")

    async def stop(self) -> None:
        """End the watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._channel.close()

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                async for roster in self._stub.WatchRoster(refit_pb2.WatchRosterRequest()):
                    attempt = 0
                    self._on_roster(roster)
            except HeadraceError as exc:
                # Streams end at their deadline, too; only a bridge that stays away is worth a line.
                if attempt == 1:
                    self._log.warning("roster not reached", error=str(exc))
            await asyncio.sleep(backoff(attempt))
            attempt += 1
