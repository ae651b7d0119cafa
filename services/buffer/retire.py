"""Letting go of the books of a run whose ledger is sealed.

Invariant: only keys of the buffer are touched, and they expire instead of vanishing at once: whoever looks
at a run that has just ended still finds them.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from services.buffer import keys
from services.runtime.redis_errors import translated

KEEP_S = 24 * 3600
_BATCH = 1000
# The controller's records (run, journal, steps, ...) share the prefix and stay.
_FAMILIES = ("g:*", "p:*", "t:*", "n:*", "step:*", "live:*", "all:*")
_SINGLE = ("cfg", "work", "redo", "complete", "ledger", "dead", "books")


async def expire_books(redis: Redis, run: str, seconds: int = KEEP_S) -> int:
    """Let the buffer's keys of ``run`` expire after ``seconds``; returns how many."""
    lead = keys.prefix(run)
    names: list[bytes | str] = [lead + name for name in _SINGLE]
    with translated("expire books"):
        for family in _FAMILIES:
            names += [name async for name in redis.scan_iter(match=_escaped(lead) + family, count=_BATCH)]
        for start in range(0, len(names), _BATCH):
            pipe: Any = redis.pipeline(transaction=False)
            for name in names[start : start + _BATCH]:
                pipe.expire(name, seconds)
            await pipe.execute()
    return len(names)


def _escaped(text: str) -> str:
    """``text`` as a literal in a SCAN pattern."""
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)
