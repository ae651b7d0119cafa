"""When a failed call may be tried again.

Invariants: waiting is exponential with full jitter; a channel's retries together stay within a token bucket,
so that many callers cannot storm a service that comes back; an empty bucket delays a retry and never the
first attempt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

BASE_SECONDS = 0.1
CAP_SECONDS = 2.0

# Not the global generator: seeding it for a reproducible run would make all clients wait in step.
_jitter = random.SystemRandom()


class RetryBudget:
    """A token bucket: ``burst`` retries at once, ``rate`` per second after that."""

    def __init__(
        self, *, rate: float = 200.0, burst: float = 400.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._clock = clock
        self._at = clock()

    def reserve(self) -> float:
        """Take one token and return the seconds until it is there (0 when it is)."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0): full jitter."""
    return _jitter.uniform(0.0, min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(attempt, 10)))
