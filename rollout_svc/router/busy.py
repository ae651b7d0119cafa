"""Seconds in which at least one turn was at an engine.

Invariant: overlapping turns count once; the time of turns that are still there counts up to now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyClock:
    """The union of all turns' times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns = 0
        self._since = 0.0
        self._seconds = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One turn's time."""
        if not self._turns:
            self._since = self._clock()
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._seconds += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + (self._clock() - self._since if self._turns else 0.0)

    def restart(self) -> None:
        """Begin at zero; turns that are there count from now."""
        self._seconds, self._since = 0.0, self._clock()
