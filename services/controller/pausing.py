"""The switch that holds a run's step loop.

Invariants: a paused loop starts no step and opens no groups; what is in flight finishes; time spent paused
counts neither as run time nor against a deadline.
"""

from __future__ import annotations

import asyncio
import time


class PauseSwitch:
    """Set by people, consulted by the step loop."""

    def __init__(self, *, paused: bool = False) -> None:
        self._open = asyncio.Event()
        if not paused:
            self._open.set()

    @property
    def paused(self) -> bool:
        """Whether the loop is to stand still."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Hold the loop at its next check."""
        self._open.clear()

    def resume(self) -> None:
        """Let the loop go on."""
        self._open.set()

    async def passed(self) -> float:
        """Wait while paused; the seconds that this took. Bounded by the run's own life (cancel ends it)."""
        if not self.paused:
            return 0.0
        began = time.monotonic()
        await self._open.wait()
        return time.monotonic() - began
