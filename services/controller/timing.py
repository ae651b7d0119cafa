"""Where the time of a run goes.

Invariants: phases are disjoint and measured by the step loop, the one place that waits for everybody; what
no phase claims is ``idle``. Only active run time counts: a run that waits to be resumed does not age.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("starting", "generation", "training", "refit", "validation", "checkpoint")


class PhaseClock:
    """Accumulates seconds by phase; ``record`` hands out what was measured since the last one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self.current = "starting"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's wall time as ``name``."""
        began, former = time.monotonic(), self.current
        self.current = name
        try:
            yield
        finally:
            self.current = former
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def record(self) -> dict[str, float]:
        """Seconds by phase and in ``total`` since the last record."""
        now = time.monotonic()
        out = {**self._seconds, "total": now - self._since}
        self._seconds, self._since = {}, now
        return out


def total(records: list[dict[str, float]]) -> dict[str, float]:
    """Sum of records, with ``idle`` as what no phase claims."""
    summed: dict[str, float] = dict.fromkeys((*PHASES, "total"), 0.0)
    for record in records:
        for name, seconds in record.items():
            summed[name] = summed.get(name, 0.0) + seconds
    claimed = sum(v for k, v in summed.items() if k != "total")
    return {**summed, "idle": max(0.0, summed["total"] - claimed)}
