"""Keeps one warm worker: starts it, replaces it when it ends or when another run wants it.

Invariants: there is at most one worker; its successor has another engine id and waits for a Setup. A worker
that ended before it served is followed by the next after 0.2 s to 5 s; ``MAX_FAILURES`` such workers in a row
are a crash loop, of which ``failed`` is told: the host ends, and its supervisor counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protos.headrace.v1 import rollout_pb2
from rollout_svc.engine.lines import Assignment
from rollout_svc.engine.process import WorkerProcess
from rollout_svc.engine.settings import EngineSettings
from services.runtime.errors import HeadraceError, Internal, NotReady
from services.runtime.logs import get_logger

BACKOFF_SECONDS = (0.2, 5.0)
MAX_FAILURES = 3
SUCCESSOR_SECONDS = 10.0


class WorkerPool:
    """One worker at a time.

    ``replaced`` is told the engine id of a worker that has ended, and why; ``failed`` that none can be kept.
    """

    def __init__(
        self,
        settings: EngineSettings,
        replaced: Callable[[str, str], None],
        failed: Callable[[HeadraceError], None],
    ) -> None:
        self._settings = settings
        self._replaced = replaced
        self._failed = failed
        self._worker: WorkerProcess | None = None
        self._lock = asyncio.Lock()
        self._started = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._log = get_logger("engine")

    @property
    def worker(self) -> WorkerProcess:
        """The current worker; raises NotReady between two."""
        if self._worker is None:
            raise NotReady("The engine's worker is being started", do="Repeat the call.")
        return self._worker

    async def start(self) -> None:
        """Start the first worker and the task that keeps one there."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name="worker keeper")
        self._keeper.add_done_callback(self._kept)

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """End the worker for good; ``drain_seconds`` is what its turns may take."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._worker is not None:
            await self._worker.stop(drain_seconds)

    async def setup(self, assignment: Assignment) -> rollout_pb2.EngineInfo:
        """The info of a worker that serves ``assignment``; a worker of another run is replaced first."""
        async with self._lock:
            worker = self.worker
            if worker.assignment not in (None, assignment):
                self._log.info("worker gives way to another run", engine=worker.engine, run=assignment.run)
                self._started.clear()
                await worker.stop()
                await asyncio.wait_for(self._started.wait(), SUCCESSOR_SECONDS)
                worker = self.worker
            waiting = asyncio.ensure_future(worker.assign(assignment))
            await asyncio.sleep(0)  # the assignment is taken before the lock is free
        return await waiting

    async def _spawn(self) -> None:
        worker = WorkerProcess(self._settings)
        await worker.start()
        self._worker = worker
        self._started.set()

    async def _keep(self) -> None:
        failures = 0
        while True:
            worker = self.worker
            await worker.ended.wait()
            self._worker = None
            self._replaced(worker.engine, "its worker has ended")
            failures = 0 if worker.served else failures + 1
            if failures >= MAX_FAILURES:
                raise Internal(
                    f"{failures} workers in a row ended before they served; the last: {worker.failure}",
                    where="engine",
                    do="See the engine's log.",
                    reason="CRASH_LOOP",
                )
            if failures:
                low, high = BACKOFF_SECONDS
                await asyncio.sleep(min(high, low * 2.0**failures))
            await self._spawn()

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Nobody keeps a worker any more: unless it was meant, the host must not go on without."""
        if keeper.cancelled():
            return
        error = keeper.exception()
        if isinstance(error, HeadraceError):
            self._failed(error)
        else:
            self._failed(Internal(f"No worker can be started: {error}", where="engine"))
