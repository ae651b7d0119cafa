"""The blocking client: the asyncio one on a thread and loop of its own, so that it works in notebooks too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

from protos.headrace.v1 import runs_pb2
from services.client.asynchronous import PATIENCE_S, AsyncClient, RecipeLike

Result = TypeVar("Result")


class Client:
    """Runs of the controller at ``address`` (HOST:PORT); close it, or use it with ``with``."""

    def __init__(self, address: str, *, patience_s: float = PATIENCE_S) -> None:
        self._client = AsyncClient(address, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)
        self._thread.start()

    def submit(self, recipe: RecipeLike, overrides: Sequence[str] = (), *, run: str = "") -> runs_pb2.Run:
        """Queue a run; an existing ``run`` is resumed. Raises RecipeError or InvalidInput on a bad recipe."""
        return self._call(self._client.submit(recipe, overrides, run=run))

    def get(self, run: str) -> runs_pb2.Run:
        """One run; raises NotFound."""
        return self._call(self._client.get(run))

    def list(self, limit: int = 50) -> list[runs_pb2.Run]:
        """The newest runs, newest first."""
        return self._call(self._client.list(limit))

    def cancel(self, run: str, reason: str = "") -> runs_pb2.Run:
        """Ask a run to end; idempotent."""
        return self._call(self._client.cancel(run, reason))

    def pause(self, run: str) -> runs_pb2.Run:
        """Stop dispatch at once and the loop before its next step; idempotent."""
        return self._call(self._client.pause(run))

    def unpause(self, run: str) -> runs_pb2.Run:
        """Let a paused run go on; idempotent."""
        return self._call(self._client.unpause(run))

    def resume(self, run: str, recipe: RecipeLike) -> runs_pb2.Run:
        """Go on with an interrupted ``run`` if the controller knows it, else submit it under that id."""
        return self._call(self._client.resume(run, recipe))

    def steps(self, run: str, from_step: int = 0) -> Iterator[runs_pb2.StepRecord]:
        """Records of the finished steps from ``from_step`` on, oldest first."""
        yield from self._each(self._client.steps(run, from_step))

    def audit(self, run: str) -> runs_pb2.AuditResponse:
        """Recount a run's books from the store."""
        return self._call(self._client.audit(run))

    def watch(self, run: str, from_sequence: int = 0) -> Iterator[runs_pb2.RunEvent]:
        """Events of ``run``, each once and in order, until it ends."""
        yield from self._each(self._client.watch(run, from_sequence))

    def close(self) -> None:
        """Close the connection and end the thread; idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def _each(self, found: AsyncIterator[Result]) -> Iterator[Result]:
        try:
            while (one := self._call(_next(found))) is not None:
                yield one
        finally:
            self._call(_close(found))

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        # Bounded by the deadline that every call of the asyncio client has.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(found: AsyncIterator[Result]) -> Result | None:
    return await anext(found, None)


async def _close(found: Any) -> None:
    await found.aclose()
