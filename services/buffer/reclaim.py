"""The reclaim loop: claims without a heartbeat go back to the queue, or are given up.

Invariants: the clock is Redis's, so replicas agree; a claim is taken back within a quarter of its timeout
after it has expired (at most ``LONGEST_PAUSE``); replicas that look at the same moment take each claim back
once.
"""

from __future__ import annotations

from services.buffer.store import RECLAIM_BATCH, Store

SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 2.0


def pause(claim_timeout_s: float) -> float:
    """Seconds between two looks."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, claim_timeout_s / 4))


async def reclaim_all(store: Store, run: str) -> tuple[int, int]:
    """Take back everything that has expired; returns samples (retried, given up)."""
    retried = dropped = 0
    while True:
        found = await store.reclaim(run)
        for each in found:
            each.trace(run)
            retried, dropped = retried + each.retried, dropped + (not each.retried)
        if len(found) < RECLAIM_BATCH:
            return retried, dropped
