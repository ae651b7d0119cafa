"""Long polls: woken by this replica's own changes, and by a short poll for those of the others.

Invariants: every wait ends by its deadline; a change between the look and the wait is not missed; nobody
spins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

FIRST_POLL_SECONDS = 0.05
LAST_POLL_SECONDS = 0.5
Found = TypeVar("Found")


class Bell:
    """Wakes everyone who waits."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closed = False

    def ring(self) -> None:
        """Wake them once."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Wake them for good: no wait lasts any longer."""
        self.closed = True
        self.ring()

    def listen(self) -> asyncio.Event:
        """An event that the next ring sets."""
        return self._event


async def until(
    look: Callable[[], Awaitable[Found]], enough: Callable[[Found], bool], bell: Bell, seconds: float
) -> Found:
    """Look until it is ``enough`` or ``seconds`` have passed; returns what was seen last."""
    end = time.monotonic() + seconds
    poll = FIRST_POLL_SECONDS
    while True:
        event = bell.listen()
        found = await look()
        left = end - time.monotonic()
        if enough(found) or left <= 0 or bell.closed:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(poll, left)):
                await event.wait()
        poll = min(LAST_POLL_SECONDS, poll * 2)
