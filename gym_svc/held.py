"""The claims that this worker holds.

Invariants
- At most one attempt of a sample is worked on here: a newer claim of the same sample ends the older one.
- A claim is held from the moment that it is taken until its hand-in has been answered.
- A claim that the buffer has given to somebody else is cancelled at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc, types_pb2
from services.runtime.errors import HeadraceError
from services.runtime.logs import get_logger

Key = tuple[str, int, int]


def key_of(key: types_pb2.SampleKey) -> Key:
    """A sample's key within its run."""
    return key.book, key.group, key.sample


class Held:
    """Claims and the tasks that work on them."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[buffer_pb2.Work, asyncio.Task[Any]]] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, work: buffer_pb2.Work, start: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Hold ``work`` and work on it."""
        key = key_of(work.key)
        former = self._held.pop(key, None)
        if former is not None:
            former[1].cancel()
        task = asyncio.create_task(start())
        self._held[key] = (work, task)
        task.add_done_callback(lambda done: self._release(key, done))

    def _release(self, key: Key, task: asyncio.Task[Any]) -> None:
        held = self._held.get(key)
        if held is not None and held[1] is task:
            del self._held[key]
        if not task.cancelled() and task.exception() is not None:
            get_logger("gym").error("a sample task ended badly", exc_info=task.exception())
        self.changed.set()

    def refs(self) -> list[buffer_pb2.ClaimRef]:
        """References to all claims."""
        return [buffer_pb2.ClaimRef(key=work.key, attempt=work.attempt) for work, _ in self._held.values()]

    def lose(self, ref: buffer_pb2.ClaimRef) -> bool:
        """Stop working on a claim that is no longer ours; False when it is not held any more."""
        held = self._held.get(key_of(ref.key))
        if held is None or held[0].attempt != ref.attempt:
            return False
        held[1].cancel()
        return True

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is held; False when that took longer than ``timeout`` seconds."""
        tasks = [task for _, task in self._held.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        return not self._held

    async def cancel_all(self) -> list[buffer_pb2.Work]:
        """Stop everything; returns what was being worked on."""
        held = list(self._held.values())
        for _, task in held:
            task.cancel()
        if held:
            await asyncio.wait([task for _, task in held], timeout=5.0)
        return [work for work, _ in held]


async def beat(
    stub: buffer_pb2_grpc.BufferAsyncStub, run: str, worker: str, held: Held, every: float
) -> None:
    """Keep the claims of ``held`` alive, until cancelled."""
    log = get_logger("gym")
    while True:
        await asyncio.sleep(every)
        refs = held.refs()
        if not refs:
            continue
        request = buffer_pb2.HeartbeatRequest(run=run, worker=worker, claims=refs)
        try:
            answer = await stub.Heartbeat(request, timeout=max(1.0, 2 * every))
        except Exception as exc:
            unexpected = None if isinstance(exc, HeadraceError) else exc
            log.warning("heartbeat failed", error=str(exc), claims=len(refs), exc_info=unexpected)
            continue
        lost = sum(held.lose(ref) for ref in answer.lost)
        if lost:
            log.warning("claims lost", claims=lost)
