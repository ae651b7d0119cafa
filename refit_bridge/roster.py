"""Who serves: engines, their states and their heartbeats.

Invariants
- An engine is SERVING only with the committed version; the router sends turns to no other.
- An engine that re-registers with the committed version serves at once (the bridge may have restarted);
  with another version, or none, it joins and is synced.
- QUARANTINED ends only through a full update. LOST ends with the next heartbeat.
- An engine that is set aside for a book keeps serving the version that it had then, and goes back to training
  by :meth:`release`, with a new run, or with a newer owner of the run.
- A new engine at an old engine's address replaces it: an address is served by one process.
- Subscribers see the latest roster; states in between may be left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from protos.headrace.v1 import refit_pb2, rollout_pb2, types_pb2
from refit_bridge.versions import key_of
from services.runtime import metrics
from services.runtime.errors import NotFound
from services.runtime.logs import get_logger

JOINING = refit_pb2.ENGINE_STATE_JOINING
SERVING = refit_pb2.ENGINE_STATE_SERVING
UPDATING = refit_pb2.ENGINE_STATE_UPDATING
QUARANTINED = refit_pb2.ENGINE_STATE_QUARANTINED
LOST = refit_pb2.ENGINE_STATE_LOST
RENDER_ONLY = refit_pb2.ENGINE_STATE_RENDER_ONLY
RENDER_NAME = "render"
GRACE_SECONDS = 5.0
FORGET_SECONDS = 120.0


@dataclass
class Member:
    """One engine as the bridge knows it; ``seen`` is the monotonic time of its last heartbeat."""

    info: rollout_pb2.EngineInfo
    state: refit_pb2.EngineState.ValueType
    seen: float
    reason: str = ""
    committed: types_pb2.PolicyVersion | None = None
    book: str = ""
    """What it is set aside for; empty for training."""
    since: float = 0.0
    """When the state last changed."""
    retry_at: float = 0.0
    """Not to be synced again before (time of the event loop)."""

    @property
    def engine(self) -> str:
        """Its id, unique to one life of the process."""
        return self.info.engine


class Roster:
    """All engines of the bridge. Used from one event loop."""

    def __init__(self, *, lost_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._members: dict[str, Member] = {}
        self._lost_after = lost_after
        self._clock = clock
        self._changed = asyncio.Condition()
        self._serial = 0
        self._closed = False
        self._run = ""
        self._committed: types_pb2.PolicyVersion | None = None
        self._log = get_logger("refit")

    @property
    def members(self) -> list[Member]:
        """All engines, in order of registration."""
        return list(self._members.values())

    def get(self, engine: str) -> Member | None:
        """The member, if it is still here."""
        return self._members.get(engine)

    def gone(self, engine: str) -> bool:
        """Whether the engine has left, was replaced, or has stopped its heartbeats."""
        member = self._members.get(engine)
        return member is None or member.seen < self._clock() - self._lost_after

    async def begin_run(self, run: str, committed: types_pb2.PolicyVersion | None) -> None:
        """A run starts (or the bridge learns of it again): engines count by what they say they hold."""
        self._run, self._committed = run, committed
        for member in self._members.values():
            member.committed, member.book = None, ""
            self._settle(member)
        await self._notify()

    async def committed(self, version: types_pb2.PolicyVersion) -> None:
        """A new version is in force; engines that are not brought to it fall back to joining."""
        self._committed = version
        for member in self._members.values():
            self._demote(member)
        await self._notify()

    async def lease(self, book: str, wanted: int, *, keep: int) -> list[Member]:
        """Set up to ``wanted`` serving engines aside for ``book``, while ``keep`` stay with training.

        Engines that are set aside for it already are the answer to a repeat.
        """
        held = [m for m in self._members.values() if m.book == book and m.state != LOST]
        if held:
            return held
        free = [
            m for m in self._members.values()
            if m.state == SERVING and not m.book and _same(m.committed, self._committed)
        ]  # fmt: skip
        spare = max(0, len(free) - max(1, keep))
        # The youngest: the others have the caches that training's samples go back to.
        taken = free[len(free) - min(spare, wanted) :]
        for member in taken:
            member.book = book
            self._log.info("engine set aside", engine=member.engine, book=book)
        if taken:
            await self._notify()
        return taken

    async def release(self, book: str = "") -> None:
        """Give the engines of ``book`` (of every book) back to training; idempotent."""
        leased = [m for m in self._members.values() if m.book and book in ("", m.book)]
        for member in leased:
            member.book = ""
            self._log.info("engine given back", engine=member.engine)
            self._demote(member)
        if leased:
            await self._notify()

    async def register(self, info: rollout_pb2.EngineInfo) -> None:
        """An engine says that it is alive, and what it holds."""
        member = self._members.get(info.engine)
        if member is None:
            self._replace_at(info.address, info.engine)
            member = self._members[info.engine] = Member(info, JOINING, self._clock())
            self._log.info(
                "engine registered", engine=info.engine, address=info.address, engine_name=info.name
            )
        before = (member.info.SerializeToString(deterministic=True), member.state, member.reason)
        member.info, member.seen = info, self._clock()
        if member.state not in (UPDATING, QUARANTINED):
            self._settle(member)
        if before != (info.SerializeToString(deterministic=True), member.state, member.reason):
            await self._notify()

    async def deregister(self, engine: str, reason: str) -> None:
        """An engine leaves; unknown ones are ignored."""
        if self._members.pop(engine, None) is not None:
            self._log.info("engine left", engine=engine, reason=reason)
            await self._notify()

    async def set_state(
        self,
        engine: str,
        state: refit_pb2.EngineState.ValueType,
        reason: str = "",
        committed: types_pb2.PolicyVersion | None = None,
    ) -> None:
        """Record what a publish did to an engine; raises NotFound when it has left meanwhile."""
        member = self._members.get(engine)
        if member is None:
            raise NotFound(f"Engine {engine} has left the roster")
        member.committed = committed
        self._to(member, state, reason)
        await self._notify()

    async def expire(self) -> None:
        """Mark the engines whose heartbeats stopped, and forget those that have been away for long."""
        limit = self._clock() - self._lost_after
        dead = [
            m.engine for m in self._members.values() if m.state == LOST and m.seen < limit - FORGET_SECONDS
        ]
        for engine in dead:
            del self._members[engine]
        gone = [m for m in self._members.values() if m.seen < limit and m.state not in (LOST, UPDATING)]
        for member in gone:
            self._to(member, LOST, f"no heartbeat for {self._lost_after:.0f} s")
        if gone or dead:
            await self._notify()

    def snapshot(self) -> refit_pb2.Roster:
        """The roster now."""
        return refit_pb2.Roster(
            run=self._run, engines=[_entry(m) for m in self._members.values()], committed=self._committed
        )

    async def watch(self) -> AsyncIterator[refit_pb2.Roster]:
        """The roster now, and again after every change."""
        seen = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._serial != seen or self._closed)  # noqa: B023
                if self._closed:
                    return
                seen = self._serial
            yield self.snapshot()

    async def close(self) -> None:
        """End all watches: the service stops."""
        self._closed = True
        await self._notify()

    def _settle(self, member: Member) -> None:
        """State by what the engine says of itself."""
        info = member.info
        held = info.version if info.HasField("version") else None
        if info.name == RENDER_NAME:
            self._to(member, RENDER_ONLY, "")
        elif not info.ready or info.run != self._run or not self._run:
            self._to(member, JOINING, "not set up for this run")
        elif self._committed is not None and _same(held, self._committed):
            member.committed = held
            self._to(member, SERVING, "")
        elif member.book and held is not None and _same(held, member.committed):
            self._to(member, SERVING, "")
        elif not self._just_committed(member):
            self._to(member, JOINING, "waits for the committed version")

    def _demote(self, member: Member) -> None:
        """An engine that serves training holds the version in force."""
        behind = not _same(member.committed, self._committed)
        if member.state == SERVING and not member.book and behind:
            self._to(member, JOINING, "holds an older version")

    def _just_committed(self, member: Member) -> bool:
        # A heartbeat that left before the commit still names the old version, or none.
        holds = member.state == SERVING and _same(member.committed, self._committed)
        return holds and self._clock() - member.since < GRACE_SECONDS

    def _to(self, member: Member, state: refit_pb2.EngineState.ValueType, reason: str) -> None:
        if member.state != state:
            self._log.info(
                "engine state", engine=member.engine, state=refit_pb2.EngineState.Name(state), reason=reason
            )
            member.since = self._clock()
        member.state, member.reason = state, reason

    def _replace_at(self, address: str, engine: str) -> None:
        old = [m.engine for m in self._members.values() if m.info.address == address and m.engine != engine]
        for name in old:
            del self._members[name]

    def _measure(self) -> None:
        states = [member.state for member in self._members.values()]
        for name, state in refit_pb2.EngineState.items():
            label = name.removeprefix("ENGINE_STATE_").lower()
            metrics.refit_engines.set(states.count(state), {"state": label})

    async def _notify(self) -> None:
        self._measure()
        async with self._changed:
            self._serial += 1
            self._changed.notify_all()


def eligible(members: Iterable[Member], run: str) -> list[Member]:
    """Engines that a publish brings to a version: alive, with a model, set up for the run, not set aside."""
    return [
        m for m in members
        if m.info.ready and m.info.run == run and not m.book and m.state not in (LOST, RENDER_ONLY)
    ]  # fmt: skip


def _same(one: types_pb2.PolicyVersion | None, other: types_pb2.PolicyVersion | None) -> bool:
    if one is None or other is None:
        return one is other
    return key_of(one) == key_of(other) and one.digest == other.digest


def _entry(member: Member) -> refit_pb2.RosterEntry:
    return refit_pb2.RosterEntry(
        info=member.info,
        state=member.state,
        committed=member.committed,
        reason=member.reason,
        book=member.book,
    )
