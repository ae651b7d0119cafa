"""Sets engines up for the router's run: those that are there, and those that come later.

Invariants: one Setup at a time and engine; what failed is tried again, except bad input: that is kept as
the answer to the router's own Setup and to turns that wait, and nobody is asked again before the next Setup.
"""

from __future__ import annotations

import asyncio

from protos.headrace.v1 import refit_pb2, rollout_pb2
from rollout_svc.router.engine import RoutedEngine
from services.runtime.errors import HeadraceError, InvalidInput, Unsupported
from services.runtime.logs import get_logger

SETUP_SECONDS = 600.0
AGAIN_SECONDS = 1.0


class Setups:
    """Keeps ``request`` applied to every engine."""

    def __init__(self) -> None:
        self.request: rollout_pb2.EngineSetupRequest | None = None
        self.refused: HeadraceError | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engines: dict[str, RoutedEngine] = {}
        self._log = get_logger("rollout")

    @property
    def run(self) -> str:
        """The run; empty before the first Setup."""
        return self.request.run if self.request is not None else ""

    def set(self, request: rollout_pb2.EngineSetupRequest) -> None:
        """Change to another run (or the same again)."""
        if request != self.request:
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
        self.request, self.refused = request, None
        self.apply(self._engines)

    def apply(self, engines: dict[str, RoutedEngine]) -> None:
        """Start a Setup on each of ``engines`` that needs one and has none running."""
        self._engines = engines
        if self.request is None or self.refused is not None:
            return
        for engine in engines.values():
            task = self._tasks.get(engine.id)
            if self._needs(engine) and (task is None or task.done()):
                self._tasks[engine.id] = asyncio.create_task(self._setup(engine, self.request))
        for gone in [name for name in self._tasks if name not in engines]:
            self._tasks.pop(gone).cancel()

    async def settled(self) -> None:
        """Wait for the setups that are running; raises what an engine refused."""
        running = [task for task in self._tasks.values() if not task.done()]
        if running:
            await asyncio.wait(running)
        if self.refused is not None:
            raise self.refused

    async def stop(self) -> None:
        """Give up what is running."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _needs(self, engine: RoutedEngine) -> bool:
        lost = engine.entry.state == refit_pb2.ENGINE_STATE_LOST
        return not lost and engine.entry.info.run != self.run

    async def _setup(self, engine: RoutedEngine, request: rollout_pb2.EngineSetupRequest) -> None:
        # Checked again each time: the roster may say by now that it is done, by whomever.
        while self._needs(engine) and self.refused is None:
            try:
                info = await engine.call("Setup", request, SETUP_SECONDS)
            except (InvalidInput, Unsupported) as exc:
                self.refused = exc
                self._log.error("engine refuses the run", engine=engine.id, error=str(exc))
            except HeadraceError as exc:
                self._log.warning("engine not set up", engine=engine.id, error=str(exc))
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self._log.info("engine set up", engine=info.engine, run=info.run)
                return
