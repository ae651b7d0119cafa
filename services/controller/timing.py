"""Where the time of a run goes.

Invariants: phases are disjoint and measured by the step loop, the one place that waits for everybody; what
no phase claims is ``idle``. Only active run time counts: a run that is paused, or waits to be resumed, does
not age. ``generation`` is the part of the loop's wait for samples in which a turn was at an engine, and
``environment`` what of the rest the step's slowest sample can have spent in its environment and verifier:
both are upper bounds, so that what is left over as overhead is a lower one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("starting", "generation", "environment", "training", "refit", "validation", "checkpoint")
# What a run pays for being orchestrated; all else does the work that the recipe asks for.
OVERHEAD = ("starting", "checkpoint", "idle")


class PhaseClock:
    """Accumulates seconds by phase; ``record`` hands out what was measured since the last one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self._paused = 0.0
        self.current = "starting"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's wall time as ``name``."""
        began, paused, former = time.monotonic(), self._paused, self.current
        self.current = name
        try:
            yield
        finally:
            self.current = former
            spent = time.monotonic() - began - (self._paused - paused)
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def skip(self, seconds: float) -> None:
        """``seconds`` up to now were no run time."""
        self._paused += seconds
        self._since += seconds

    def split_generation(self, busy: float, environment: float) -> None:
        """Split the wait for samples: ``busy`` seconds had a turn at an engine, up to ``environment`` of the
        others were a sample's time in its environment; the rest becomes idle."""
        waited = self._seconds.get("generation", 0.0)
        generation = min(waited, max(0.0, busy))
        self._seconds["generation"] = generation
        self._seconds["environment"] = min(waited - generation, max(0.0, environment))

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


def overhead(timing: dict[str, float]) -> dict[str, float]:
    """Seconds and share of ``total`` that went into neither generation, environment, training, refit nor
    validation."""
    seconds = sum(timing.get(name, 0.0) for name in OVERHEAD)
    whole = timing.get("total", 0.0)
    return {"seconds": seconds, "share": seconds / whole if whole else 0.0}
