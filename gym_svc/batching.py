"""Small batches out of single requests.

Invariants
- An item waits for at most ``delay`` seconds, and never once ``size`` items are there.
- Items whose caller has gone away are left out.
- Every caller gets its own result, or the error of its batch.
- Several batches may be under way at once; each runs outside of any sample's context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH_ITEMS = 64
BATCH_DELAY_S = 0.005


class Batcher(Generic[Item, Result]):
    """Collects items and hands them to ``flush``, which answers in the order of the items."""

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        size: int = BATCH_ITEMS,
        delay: float = BATCH_DELAY_S,
    ) -> None:
        self._flush = flush
        self._size = size
        self._delay = delay
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, item: Item) -> Result:
        """The result of ``item``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._size:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(self._delay, self._start)
        return await future

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, future) for item, future in self._waiting if not future.done()]
        self._waiting = []
        if batch:
            # An empty context: the batch belongs to no single sample, and its spans and ids must not say so.
            task = asyncio.get_running_loop().create_task(self._run(batch), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._flush([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items got {len(results)} results")
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 (handed to every caller)
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def close(self, timeout: float) -> None:
        """Finish what is under way within ``timeout`` seconds."""
        self._start()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        for task in self._tasks:
            task.cancel()
