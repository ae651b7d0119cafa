"""Keeps a set of child processes running, and leaves none behind.

Invariants
- Children are spawned from the main thread only (death signals follow the spawning *thread*), each as the
  leader of a session of its own, behind :mod:`services.runtime.spawn`.
- When a child ends, what is left of its process group, its session and its token
  (:mod:`services.runtime.sweep`) is killed *before* the child is reaped: until then its pid, and so its group
  and session id, cannot belong to anybody else.
- When the supervisor itself is killed, death signals end its children and the sweeper ends what they leave.
- Restarts wait 0.2 s to 5 s and are limited; over the limit the whole stack fails, with the last log lines.
- Exit status 2 means bad input: it is never restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from services.runtime.child import Child, ProcessEvent, ProcessSpec, ProcessStatus
from services.runtime.errors import HeadraceError, Internal, InvalidInput, NotFound, NotReady
from services.runtime.sweeper import Sweeper

__all__ = ["ProcessEvent", "ProcessSpec", "ProcessStatus", "Supervisor"]

POLL_SECONDS = 0.05
BACKOFF_SECONDS = (0.2, 5.0)
BAD_INPUT = 2


class Supervisor:
    """Starts, watches, restarts and stops processes. Lives on the main thread's event loop."""

    def __init__(
        self,
        on_event: Callable[[ProcessEvent], None] | None = None,
        *,
        max_restarts: int = 10,
        window_seconds: float = 300.0,
    ) -> None:
        self._on_event = on_event or (lambda _: None)
        self._max_restarts = max_restarts
        self._window = window_seconds
        self._children: dict[str, Child] = {}
        self._sweeper = Sweeper()
        self._stopping = False

    async def start_all(self, specs: Sequence[ProcessSpec]) -> None:
        """Start ``specs`` together and wait until all are ready; may be called again for more.

        Raises InvalidInput when a child refuses its input, NotReady when one is not ready in time; those that
        run already go on until :meth:`stop_all`.
        """
        for spec in specs:
            child = Child(spec, self._sweeper)
            self._children[spec.name] = child
            self._spawn(child)
        started = time.monotonic()
        # One that is removed meanwhile is not waited for.
        while waiting := [spec for spec in specs if not self._is_ready(spec.name)]:
            await self.poll()
            for spec in waiting:
                if time.monotonic() - started > spec.start_timeout and not self._is_ready(spec.name):
                    raise _late(self._children[spec.name])
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """One pass: reap, restart, notice readiness. Raises when the stack has failed."""
        for child in list(self._children.values()):
            if child.running:
                self._look(child)
            elif child.restart_at is not None and time.monotonic() >= child.restart_at and not self._stopping:
                self._spawn(child)

    async def watch(self) -> None:
        """Poll until the stack fails (raises) or the task is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def wait(self, name: str, timeout: float) -> int:
        """Exit status of process ``name`` once it has ended for good. Raises NotReady after ``timeout``."""
        end = time.monotonic() + timeout
        child = self._child(name)
        while child.running or child.restart_at is not None:
            if time.monotonic() > end:
                raise NotReady(f"{name} did not end within {timeout:g} s", where=str(child.spec.log_file))
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)
        return child.exit_status if child.exit_status is not None else 0

    def status(self) -> list[ProcessStatus]:
        """All processes, in the order in which they were started."""
        return [child.status() for child in self._children.values()]

    def ready_record(self, name: str) -> dict[str, object]:
        """Content of the ready file of process ``name``: ``address`` and ``pid``."""
        return dict(self._child(name).record)

    async def stop_all(self, timeout: float | None = None) -> None:
        """Stop stage by stage: SIGTERM, a bounded wait, SIGKILL of the whole group."""
        self._stopping = True
        for child in self._children.values():
            child.restart_at = None
        for stage in sorted({child.spec.stop_stage for child in self._children.values()}):
            running = [c for c in self._children.values() if c.running and c.spec.stop_stage == stage]
            for child in running:
                child.terminate()
            await asyncio.gather(*(self._stop(child, timeout) for child in running))
        self._sweeper.close()

    async def remove(self, names: Sequence[str]) -> None:
        """Stop processes ``names`` for good: SIGTERM, a bounded wait, SIGKILL of the whole group."""
        leaving = [self._children.pop(self._child(name).spec.name) for name in names]
        for child in leaving:
            child.restart_at = None
            child.terminate()
        await asyncio.gather(*(self._stop(child, None) for child in leaving))

    async def _stop(self, child: Child, timeout: float | None) -> None:
        end = time.monotonic() + (child.spec.stop_timeout if timeout is None else timeout)
        while child.running and time.monotonic() < end:
            self._reap(child)
            await asyncio.sleep(POLL_SECONDS / 2)
        child.kill()
        self._event("stopped", child)

    def kill_all(self) -> None:
        """SIGKILL every group at once; for a second signal of the user."""
        self._stopping = True
        for child in self._children.values():
            child.restart_at = None
            child.kill()
        self._sweeper.close()

    def _is_ready(self, name: str) -> bool:
        child = self._children.get(name)
        return child is None or child.ready

    def _child(self, name: str) -> Child:
        if name not in self._children:
            raise NotFound(f"No process is called {name}")
        return self._children[name]

    def _spawn(self, child: Child) -> None:
        child.spawn()
        self._event("started", child)
        if child.ready:
            self._event("ready", child)

    def _look(self, child: Child) -> None:
        if self._reap(child):
            self._event("exited", child, child.describe_exit())
            self._after_exit(child)
        elif not child.ready and child.check_ready():
            self._event("ready", child)
        elif child.late() and child.restarts:
            # A restarted child that hangs in its start is as dead as one that ended.
            child.kill()
            self._event("exited", child, "not ready in time")
            self._after_exit(child)

    def _reap(self, child: Child) -> bool:
        return child.reap()

    def _after_exit(self, child: Child) -> None:
        if self._stopping:
            return
        if child.exit_status == BAD_INPUT:
            raise InvalidInput(child.last_line() or f"{child.spec.name} refused its input", where=child.where)
        if not child.spec.restart:
            if not child.was_ready:
                raise _ended(child)
            return
        recent = child.exits_within(self._window)
        if recent > self._max_restarts:
            raise _too_often(child, recent, self._window)
        low, high = BACKOFF_SECONDS
        child.restart_at = time.monotonic() + min(high, low * 2.0 ** (recent - 1))

    def _event(self, kind: str, child: Child, detail: str = "") -> None:
        self._on_event(ProcessEvent(kind, child.spec.name, child.pid, child.restarts, detail))


def _late(child: Child) -> HeadraceError:
    return NotReady(
        f"{child.spec.name} was not ready within {child.spec.start_timeout:g} s",
        where=child.where,
        do=f"Its last lines: {child.tail()}",
    )


def _ended(child: Child) -> HeadraceError:
    return Internal(
        f"{child.spec.name} {child.describe_exit()} before it was ready",
        where=child.where,
        do=f"Its last lines: {child.tail()}",
    )


def _too_often(child: Child, times: int, window: float) -> HeadraceError:
    return Internal(
        f"{child.spec.name} ended {times} times within {window:g} s; last: {child.describe_exit()}",
        where=child.where,
        do=f"Its last lines: {child.tail()}",
        reason="CRASH_LOOP",
    )
