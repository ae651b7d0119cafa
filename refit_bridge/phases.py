"""Seconds by phase.

Invariants: a phase entered twice adds up; phases of engines that ran side by side combine to the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from services.runtime import tracing


class Phases:
    """A stopwatch whose phases are also spans ``refit.<phase>``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        started = time.monotonic()
        try:
            with tracing.span(f"refit.{name}"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def slowest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The longest time of each phase."""
    combined: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            combined[name] = max(combined.get(name, 0.0), seconds)
    return combined
