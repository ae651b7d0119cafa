"""Brings engines that join or return late to the committed version, in the background.

Invariants
- A publish has priority: it ends running syncs and waits for their end; none starts before it is over.
- Only JOINING engines are synced; a quarantined one waits for the next publish.
- An engine whose sync failed is not tried again at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from refit_bridge.publish import Publisher, RunState
from refit_bridge.roster import JOINING, Member, Roster, eligible
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger

TICK_SECONDS = 0.25


class LateSync:
    """Runs :meth:`forever` as a task; ``state`` gives the current run, if there is one."""

    def __init__(
        self, roster: Roster, publisher: Publisher, state: Callable[[], RunState | None], retry_seconds: float
    ) -> None:
        self._roster = roster
        self._publisher = publisher
        self._state = state
        self._retry_seconds = retry_seconds
        self._syncs: dict[str, asyncio.Task[None]] = {}
        self._publish = asyncio.Lock()
        self._log = get_logger("refit")

    async def forever(self) -> None:
        """Look for late engines and for silent ones, again and again."""
        while True:
            await self._roster.expire()
            self._start_syncs()
            await asyncio.sleep(TICK_SECONDS)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Exclusive use of the engines (for a publish, or a change of run)."""
        async with self._publish:
            await self._stop_syncs()
            yield

    async def stop(self) -> None:
        """End all syncs."""
        await self._stop_syncs()

    def _start_syncs(self) -> None:
        state = self._state()
        if state is None or state.committed is None or self._publish.locked():
            return
        now = asyncio.get_running_loop().time()
        for member in eligible(self._roster.members, state.run):
            if member.state == JOINING and member.retry_at <= now and member.engine not in self._syncs:
                self._syncs[member.engine] = asyncio.create_task(self._sync(state, member))

    async def _sync(self, state: RunState, member: Member) -> None:
        # A failure of the engine is logged and parked by the publisher; here is what comes before (staging).
        try:
            outcome = await self._publisher.sync(state, member)
            if outcome.error is None:
                self._log.info("engine synced", engine=member.engine, seconds=outcome.phases.seconds)
        except HeadraceError as exc:
            self._log.warning("engine could not be synced", engine=member.engine, error=str(exc))
            member.retry_at = asyncio.get_running_loop().time() + self._retry_seconds
            await self._back_to_joining(member, str(exc))
        except asyncio.CancelledError:
            await self._back_to_joining(member, "its sync was interrupted by a publish")
            raise
        finally:
            self._syncs.pop(member.engine, None)

    async def _back_to_joining(self, member: Member, reason: str) -> None:
        if self._roster.get(member.engine) is member:
            await self._roster.set_state(member.engine, JOINING, reason)

    async def _stop_syncs(self) -> None:
        tasks = list(self._syncs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
