"""The engines of the roster, and waiting for one that can take a turn.

Invariants
- The bridge's roster decides who serves; the router's gates decide whether it may be sent to now.
- A sample keeps its engine while that one serves and is open; else the least loaded one takes it.
- Turns of a book for which engines are set aside go there and nowhere else; all other turns go to the others.
- Every wait has a bound, and is woken by each change of the roster or of a gate.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from protos.headrace.v1 import refit_pb2
from rollout_svc.router.engine import RoutedEngine
from services.runtime.errors import NotReady

RECHECK_SECONDS = 0.25
"""An engine that is avoided becomes eligible again without any event."""


class Fleet:
    """All known engines."""

    def __init__(self, *, affinity_samples: int = 65536) -> None:
        self.engines: dict[str, RoutedEngine] = {}
        self.waiting = 0
        self._affinity: OrderedDict[object, str] = OrderedDict()
        self._affinity_samples = affinity_samples
        self._changed = asyncio.Event()
        self._closed: set[str] = set()
        self._all_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, entries: Iterable[refit_pb2.RosterEntry]) -> None:
        """Take the roster; engines that are no longer in it are forgotten."""
        seen: dict[str, RoutedEngine] = {}
        for entry in entries:
            known = self.engines.get(entry.info.engine)
            engine = known or RoutedEngine(entry)
            engine.entry = entry
            engine.open = not self._all_closed and engine.id not in self._closed
            seen[engine.id] = engine
        for gone in set(self.engines) - set(seen):
            self._closed.discard(gone)
            task = asyncio.create_task(self.engines[gone].close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self.engines = seen
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close_gates(self, ids: Iterable[str]) -> list[RoutedEngine]:
        """Close the gates of ``ids`` (all, and of those to come, when there is none); the engines meant."""
        names = set(ids)
        self._all_closed = self._all_closed or not names
        self._closed |= names
        meant = [engine for engine in self.engines.values() if not names or engine.id in names]
        for engine in meant:
            engine.open = False
        return meant

    def open_gates(self, ids: Iterable[str]) -> None:
        """Open the gates of ``ids``, all of them when there is none."""
        names = set(ids)
        if not names:
            self._all_closed = False
            self._closed.clear()
        self._closed -= names
        for engine in self.engines.values():
            engine.open = not self._all_closed and engine.id not in self._closed
        self.notify()

    def pick(self, run: str, sample: object, book: str) -> RoutedEngine | None:
        """The engine for a turn of ``sample`` of ``book`` now, if there is one."""
        free = [engine for engine in self.meant_for(book) if engine.open and engine.serves(run)]
        if not free:
            return None
        kept = self._affinity.get(sample)
        chosen = next((engine for engine in free if engine.id == kept), None)
        if chosen is None:
            chosen = min(free, key=lambda engine: engine.in_flight)
            self._remember(sample, chosen.id)
        return chosen

    def meant_for(self, book: str) -> list[RoutedEngine]:
        """The engines that are set aside for ``book``, else those that are not set aside."""
        aside = [engine for engine in self.engines.values() if book and engine.set_aside_for(book)]
        return aside or [engine for engine in self.engines.values() if not engine.entry.book]

    async def wait_for(
        self, pick: Callable[[], RoutedEngine | None], deadline: float, why: Callable[[], str]
    ) -> RoutedEngine:
        """``pick()`` as soon as it finds one; raises NotReady at ``deadline`` (loop time) with ``why()``."""
        loop = asyncio.get_running_loop()
        while (engine := pick()) is None:
            left = deadline - loop.time()
            if left <= 0:
                raise NotReady(f"No engine can take the call: {why()}", where="rollout", reason="NO_ENGINE")
            self.waiting += 1
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, RECHECK_SECONDS))
            except TimeoutError:
                continue
            finally:
                self.waiting -= 1
        return engine

    def describe(self, run: str) -> str:
        """Why nobody serves ``run``, for an error."""
        if not self.engines:
            return "the roster is empty"
        return "; ".join(_describe(engine, run) for engine in self.engines.values())

    async def close(self) -> None:
        """Close all channels; calls have ended."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(engine.close(0.0) for engine in self.engines.values()))

    def _remember(self, sample: object, engine: str) -> None:
        self._affinity[sample] = engine
        self._affinity.move_to_end(sample)
        while len(self._affinity) > self._affinity_samples:
            self._affinity.popitem(last=False)


def _describe(engine: RoutedEngine, run: str) -> str:
    state = refit_pb2.EngineState.Name(engine.entry.state).removeprefix("ENGINE_STATE_").lower()
    aside = f", set aside for {engine.entry.book}" if engine.entry.book else ""
    gate = "" if engine.open else ", gate closed"
    other = "" if engine.entry.info.run == run else ", not set up for this run"
    return f"{engine.id} {state}{gate}{aside}{other}"
