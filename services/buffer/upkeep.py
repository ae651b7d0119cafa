"""What a replica does for its runs without being asked: admission and reclaim.

Invariants: a run has upkeep from the first call that names it until ``IDLE_SECONDS`` after the last one; a
Redis that does not answer pauses the loops and never ends them; loops of several replicas do not get in
each other's way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.buffer import keys
from services.buffer.admit import Admission
from services.buffer.reclaim import pause, reclaim_all
from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions
from services.buffer.waiting import Bell
from services.runtime import metrics
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger
from services.runtime.redis_errors import translated

IDLE_SECONDS = 900.0
RETRY_SECONDS = 0.5
TAKE_OVER_SECONDS = 2.0
MEASURE_SECONDS = 2.0
# A run of which nothing is heard any more keeps its last values.
RECENT_SECONDS = 10.0
GROUP_STATES = ("open", "complete", "ready", "leased", "trained", "durable", "dropped")

log = get_logger("buffer")


class RunUpkeep:
    """The bells and loops of one run."""

    def __init__(self, transitions: Transitions, store: Store, run: str, consumer: str) -> None:
        self.work = Bell()
        """Rings when there may be samples to claim."""
        self.books = Bell()
        """Rings when counts or states have changed."""
        self._do, self._store, self._run = transitions, store, run
        self._admission = Admission(transitions, run, consumer)
        self._used = time.monotonic()
        self._steps = Steps(transitions)
        loops = (self._admit, self._take_over, self._reclaim, self._measure)
        self._tasks = [
            asyncio.create_task(self._repeat(loop), name=f"{run} {loop.__name__}") for loop in loops
        ]

    def touch(self) -> None:
        """The run is in use."""
        self._used = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether the run has not been in use for long."""
        return time.monotonic() - self._used > IDLE_SECONDS

    @property
    def _recent(self) -> bool:
        return time.monotonic() - self._used < RECENT_SECONDS

    async def close(self) -> None:
        """End loops and waits."""
        self.work.close()
        self.books.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _repeat(self, action: Callable[[], Awaitable[None]]) -> None:
        failing = ""
        while True:
            try:
                await action()
                failing = ""
            except Exception as exc:  # upkeep must go on; what failed is logged
                # Once for each fault: a Redis that is down would fill the log.
                if failing != str(exc):
                    failing = str(exc)
                    expected = isinstance(exc, HeadraceError)
                    log.error(
                        "upkeep failed", run=self._run, error=failing, exc_info=None if expected else exc
                    )
                await asyncio.sleep(RETRY_SECONDS)

    async def _admit(self) -> None:
        if await self._admission.take_new():
            self.books.ring()

    async def _take_over(self) -> None:
        await asyncio.sleep(TAKE_OVER_SECONDS)
        if await self._admission.take_over():
            self.books.ring()

    async def _reclaim(self) -> None:
        with translated("buffer, reclaim"):
            timeout_ms = await self._do.redis.hget(keys.config(self._run), "claim_ms")
        retried, dropped = await reclaim_all(self._store, self._run)
        if retried or dropped:
            log.info("claims expired", run=self._run, retried=retried, dropped=dropped)
            self.work.ring()
            self.books.ring()
        await asyncio.sleep(pause(int(timeout_ms or 0) / 1000))

    async def _measure(self) -> None:
        await asyncio.sleep(MEASURE_SECONDS)
        if not self._recent:
            return
        seen = await self._steps.progress(self._run, keys.TRAIN)
        run = {"run": self._run}
        for state in GROUP_STATES:
            metrics.buffer_groups.set(seen.groups_by_state[state], {**run, "state": state})
        samples = {"queued": seen.samples_queued, "claimed": seen.samples_claimed, "done": seen.samples_done}
        metrics.record_all(metrics.buffer_samples, samples, "state", **run)
        metrics.record_all(metrics.buffer_dropped, dict(seen.groups.dropped), "reason", **run)
        metrics.buffer_redeliveries.set(seen.redeliveries, run)
        metrics.buffer_duplicates.set(seen.duplicates, run)


class Upkeep:
    """Upkeep of all runs that this replica has heard of."""

    def __init__(self, transitions: Transitions, store: Store, consumer: str) -> None:
        self._do, self._store, self._consumer = transitions, store, consumer
        self._runs: dict[str, RunUpkeep] = {}
        self._closed = False
        self.assigned = Bell()
        """Rings when the stack's assignment may have changed."""

    def of(self, run: str) -> RunUpkeep:
        """The upkeep of ``run``, which exists; started when it is new here."""
        found = self._runs.get(run)
        if found is None:
            found = self._runs[run] = RunUpkeep(self._do, self._store, run, self._consumer)
            if self._closed:
                found.work.close()
                found.books.close()
        found.touch()
        return found

    def release_waits(self) -> None:
        """Answer every long poll now, and all that come later at once."""
        self._closed = True
        self.assigned.close()
        for run in self._runs.values():
            run.work.close()
            run.books.close()

    async def sweep(self) -> None:
        """Forget runs that are no longer in use; runs until cancelled."""
        while True:
            await asyncio.sleep(60.0)
            for name in [name for name, run in self._runs.items() if run.idle]:
                await self._runs.pop(name).close()

    async def close(self) -> None:
        """End all loops."""
        self.release_waits()
        for run in self._runs.values():
            await run.close()
        self._runs.clear()
