"""Which weights an engine holds, and what it may do with them.

Invariants
- A turn begins only under a committed version; from the begin of an update until its commit there is none.
- Weights have a *label* that no other weights of this process ever had. A token is answered only when the
  weights that sampled it were committed: the label of an update that failed never gets a version.
- During an in-flight update (``carrying``) turns wait for its outcome instead of being turned away.
- A generation token fences updates: an older one is refused, a newer one abandons what is unfinished.
- After the first byte of an update the engine is *broken* until a complete one has finished without failures;
  it is never resumed in between (vLLM's parameters may have no storage then: a step would kill its process).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum

from protos.headrace.v1 import types_pb2
from services.runtime.errors import Fenced, NotReady, Refused

BASE_LABEL = "0:0:0"


class Phase(Enum):
    """Where an engine is in the life of its weights."""

    CLEAN = "clean"
    """Whole weights: the base model's, or those of a finished update."""
    UPDATING = "updating"
    BROKEN = "broken"
    """An update failed or was abandoned; only a new one helps."""


class Versions:
    """The state that Turn, Score, Resume and the update calls consult."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.generation = 0
        self.phase = Phase.CLEAN
        self.paused = False
        self.committed: types_pb2.PolicyVersion | None = None
        self.pending: types_pb2.PolicyVersion | None = None
        self.label = BASE_LABEL
        """Of the weights that the engine holds, or is about to hold."""
        self.carrying = False
        """An in-flight update has stopped the turns and is not over."""
        self.carries = 0
        """In-flight updates so far."""
        self._awaited = False
        self._by_label: dict[str, types_pb2.PolicyVersion] = {}
        self._changed = asyncio.Event()

    def serving(self) -> types_pb2.PolicyVersion:
        """The committed version; raises NotReady when there is none."""
        if self.committed is None:
            raise NotReady(
                "The engine has no committed version",
                where=f"engine of run {self.run}",
                do="The refit bridge commits one after its probe.",
                reason="NO_VERSION",
            )
        return self.committed

    async def admitted(self) -> types_pb2.PolicyVersion:
        """The version that a turn begins under; waits while an in-flight update is under way."""
        while self.carrying:
            await self._changed.wait()
        return self.serving()

    async def committed_as(self, labels: Iterable[str]) -> list[types_pb2.PolicyVersion]:
        """The versions of ``labels``; waits for the commit of an update in progress.

        Raises NotReady when one of them will never be committed.
        """
        wanted = list(labels)
        while unknown := {label for label in wanted if label not in self._by_label}:
            if unknown != {self.label} or not self._awaited:
                raise NotReady(
                    "The turn was sampled by weights that were not committed",
                    do="Repeat it.",
                    reason="NOT_COMMITTED",
                )
            await self._changed.wait()
        return [self._by_label[label] for label in wanted]

    def scoring(self, *, probe: bool) -> types_pb2.PolicyVersion:
        """The version that a Score answers for; a probe may ask before the commit."""
        if self.phase is not Phase.CLEAN:
            raise NotReady("The engine's weights are not whole", reason="UPDATING")
        if probe:
            return self.pending or self.committed or types_pb2.PolicyVersion()
        return self.serving()

    def salt(self, version: types_pb2.PolicyVersion) -> str:
        """The prefix cache's salt: cached prefixes of other weights are out of reach."""
        return f"{self.run}:{version.incarnation}:{version.number}"

    def carry(self) -> None:
        """An in-flight update begins: turns wait until :meth:`commit`, :meth:`resumed` or :meth:`give_up`."""
        self.carrying = True
        self.carries += 1

    def resumed(self) -> None:
        """The engine schedules again; an in-flight update that never began is over."""
        self.paused = False
        if not self._awaited:
            self._settle()

    def give_up(self) -> None:
        """No commit will come for the update in progress: turns that wait for it are given up."""
        self._awaited = False
        self._settle()

    def begin(self, generation: int, version: types_pb2.PolicyVersion) -> None:
        """Enter an update; raises Fenced for an older or used generation, Refused when not paused."""
        self.fence(generation)
        if generation == self.generation:
            raise Fenced(f"Generation {generation} was begun before", do="Begin with a newer generation.")
        if not self.paused:
            raise Refused("The engine is not paused", do="Pause it before BeginUpdate.", reason="NOT_PAUSED")
        self.generation = generation
        self.phase = Phase.BROKEN  # until the engine has entered the update without fault
        self.committed, self.pending = None, types_pb2.PolicyVersion()
        self.pending.CopyFrom(version)
        self.label = f"{version.incarnation}:{version.number}:{generation}"
        self._awaited = True
        self._notify()

    def expect(self, generation: int) -> None:
        """Check that the update ``generation`` is the one in progress."""
        self.fence(generation)
        if generation != self.generation or self.phase is not Phase.UPDATING:
            raise Refused(f"No update {generation} is in progress", do="Begin one.", reason="NO_UPDATE")

    def fence(self, generation: int) -> None:
        """Refuse what an older owner of the update asks."""
        if generation < self.generation:
            raise Fenced(
                f"Generation {generation} is older than {self.generation}", reason="STALE_GENERATION"
            )

    def may_resume(self) -> None:
        """Raise Refused unless the weights are whole."""
        if self.phase is not Phase.CLEAN:
            raise Refused(
                "The engine holds half an update and stays paused",
                do="Finish a complete update first.",
                reason="BROKEN",
            )

    def commit(self, run: str, generation: int, version: types_pb2.PolicyVersion) -> None:
        """Make ``version`` the committed one; repeating it is no error."""
        if run != self.run:
            raise Refused(f"The engine serves run {self.run}, not {run}", reason="OTHER_RUN")
        self.fence(generation)
        if self.phase is not Phase.CLEAN:
            raise Refused("The update did not finish", do="Finish it first.", reason="BROKEN")
        if self.pending is not None and not _same(self.pending, version):
            raise Refused(f"The update carries {_name(self.pending)}, not {_name(version)}")
        self.generation = generation
        self.committed, self.pending = types_pb2.PolicyVersion(), None
        self.committed.CopyFrom(version)
        self._by_label[self.label] = self.committed
        self._awaited = False
        self._settle()

    def _settle(self) -> None:
        self.carrying = False
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _same(one: types_pb2.PolicyVersion, other: types_pb2.PolicyVersion) -> bool:
    # The digest is known to the bridge only after staging; the number pair identifies the weights.
    return (one.incarnation, one.number) == (other.incarnation, other.number)


def _name(version: types_pb2.PolicyVersion) -> str:
    return f"version {version.incarnation}.{version.number}"
