"""Event streams: how many there are, and how they end.

Invariants: never more than ``limit`` are open; each ends when its client goes, when its source ends, or when
the gateway drains, and closes its gRPC call then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import Any

from services.runtime.errors import Exhausted


class Streams:
    """The open event streams of this process."""

    def __init__(self, limit: int, ping_seconds: float) -> None:
        self.open = 0
        self.ping_seconds = ping_seconds
        self._limit = limit
        self._closing = asyncio.Event()

    def check(self) -> None:
        """Raise Exhausted when no more may be opened."""
        if self.open >= self._limit:
            raise Exhausted(
                f"{self.open} event streams are open", where="gateway", do="Close one, or ask again later."
            )

    @property
    def closing(self) -> bool:
        """Whether the gateway drains."""
        return self._closing.is_set()

    def close(self) -> None:
        """End all of them: the gateway drains."""
        self._closing.set()

    async def until_closed(self, source: Any) -> AsyncIterator[Any]:
        """The messages of ``source`` (a response stream), until it ends or the gateway drains."""
        closing = asyncio.create_task(self._closing.wait())
        with self._counted():
            try:
                async with source:
                    while (message := await _next_or(source, closing)) is not None:
                        yield message
            finally:
                closing.cancel()

    @contextmanager
    def _counted(self) -> Any:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


async def _next_or(source: Any, closing: asyncio.Task[bool]) -> Any:
    """The next message; None at the end or once ``closing`` is done."""
    following = asyncio.ensure_future(anext(source, None))
    try:
        await asyncio.wait([following, closing], return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else None
    finally:
        following.cancel()
