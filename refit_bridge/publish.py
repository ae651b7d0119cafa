"""Publishing a version: stage, check the plan, bring every engine there side by side, commit.

Invariants
- One publish at a time; the background sync of late engines stands back while one runs.
- A version is committed when at least ``min_engines`` engines hold it and answer as the trainer does; engines
  that failed are quarantined and do not hold up the others.
- A version that fails is released at the trainer, so that publishing it again starts from fresh bytes.
- Publishing the committed version again touches only the engines that do not hold it.
- In flight, turns go on under the new version; after a restore (a new incarnation) they are given up, since
  what they sampled belongs to versions that are undone.
- Engines that are set aside for a book are passed by, and count for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from protos.headrace.v1 import refit_pb2, rollout_pb2, trainer_pb2, trainer_pb2_grpc, types_pb2
from refit_bridge import probe
from refit_bridge.cycle import DRAINED, EngineCycle, Gate, Outcome, ProbeSettings, Target, Way
from refit_bridge.ledger import COMMITTED, FAILED, STAGED, Committed, Logprobs, VersionLedger
from refit_bridge.phases import Phases, slowest
from refit_bridge.plan import TensorSpec
from refit_bridge.roster import JOINING, QUARANTINED, SERVING, UPDATING, Member, Roster, eligible
from refit_bridge.settings import RefitSettings
from refit_bridge.staged import check_staged, describe, plan_of
from refit_bridge.versions import BASE, key_of, make, text_of
from services.runtime import metrics, tracing
from services.runtime.errors import HeadraceError, NotFound, NotReady, Refused
from services.runtime.logs import bind_ids, get_logger

GONE_CHECK_SECONDS = 0.2


@dataclass
class RunState:
    """What the bridge knows of the current run."""

    run: str
    epoch: int
    transport: str
    min_engines: int
    probe: ProbeSettings
    ledger: VersionLedger
    committed: Committed | None
    plan: tuple[TensorSpec, ...]
    in_flight: bool = False
    recompute_kv_cache: bool = False
    staged: dict[tuple[int, int], trainer_pb2.StageWeightsResponse] = field(default_factory=dict)


class Publisher:
    """Brings engines to versions. ``trainer`` is the stub of the trainer, ``gate`` the router's gate."""

    def __init__(
        self,
        roster: Roster,
        trainer: trainer_pb2_grpc.TrainerAsyncStub,
        gate: Gate,
        settings: RefitSettings,
    ) -> None:
        self._roster = roster
        self._trainer = trainer
        self._gate = gate
        self._settings = settings
        self._log = get_logger("refit")

    async def publish(
        self, state: RunState, version: types_pb2.PolicyVersion, step: int
    ) -> refit_pb2.PublishResponse:
        """Commit ``version`` on the engines of the run. Raises NotReady when too few are there (yet)."""
        if state.committed is not None:
            current = key_of(state.committed.version)
            if key_of(version) == current:
                return await self._repeat(state, state.committed)
            if key_of(version) < current:
                raise Refused(
                    f"{text_of(version)} is older than the committed {text_of(state.committed.version)}",
                    reason="STALE_VERSION",
                )
        members = self._candidates(state)
        with bind_ids(run=state.run), tracing.span("refit.publish", step=step, number=version.number):
            return await self._publish_new(state, version, step, members)

    async def sync(self, state: RunState, member: Member) -> Outcome:
        """Bring one late engine to the committed version."""
        committed = state.committed
        if committed is None:
            raise Refused("Nothing has been committed yet", where=f"run {state.run}")
        phases = Phases()
        with bind_ids(run=state.run), tracing.span("refit.sync", engine=member.engine):
            staged = await self._staged(state, committed.version, 0, phases)
            target = self._target(state, committed.version, staged, _known(committed.expected))
            (outcome,) = await self._bring(state, target, [member])
            await self._finish(target, [outcome])
        return outcome

    def _candidates(self, state: RunState) -> list[Member]:
        members = eligible(self._roster.members, state.run)
        if len(members) < state.min_engines:
            raise NotReady(
                f"{len(members)} of {state.min_engines} engines are ready",
                where=f"run {state.run}",
                do="Wait until the engines have started.",
                reason="NOT_ENOUGH_ENGINES",
            )
        return members

    async def _publish_new(
        self, state: RunState, version: types_pb2.PolicyVersion, step: int, members: Sequence[Member]
    ) -> refit_pb2.PublishResponse:
        phases = Phases()
        record = refit_pb2.VersionRecord(version=version)
        outcomes: list[Outcome] = []
        previous = state.committed
        try:
            staged = await self._staged(state, version, step, phases)
            describe(record, staged)
            await state.ledger.record(state.epoch, record, STAGED)
            expected = _once(lambda: self._ask_trainer(state))
            target = self._target(state, record.version, staged, expected)
            outcomes = await self._bring(state, target, members)
            self._need_enough(state, record.version, outcomes)
            await self._commit(state, record, target, outcomes, phases)
            record.engines.extend(outcome.to_proto() for outcome in outcomes)
            record.seconds.update(_seconds(phases, outcomes))
            await state.ledger.record(state.epoch, record, COMMITTED)
            _measure(record)
        except BaseException:
            await self._failed(state, record, outcomes)
            raise
        carried = sum(outcome.carried for outcome in outcomes if outcome.committed)
        if previous is not None:
            await self._release(state, previous.version)
        return _response(record, carried)

    async def _staged(
        self, state: RunState, version: types_pb2.PolicyVersion, step: int, phases: Phases
    ) -> trainer_pb2.StageWeightsResponse | None:
        """The version's weights in shared memory; None for the base model."""
        key = key_of(version)
        if key == BASE:
            return None
        if key not in state.staged:
            request = trainer_pb2.StageWeightsRequest(
                run=state.run,
                version=make(key),
                transport=state.transport,
                fence=_fence(state, step or key[1]),
            )
            with phases.phase("stage"):
                staged = await self._trainer.StageWeights(request)
                check_staged(staged, version, state.plan)
            state.staged[key] = staged
        return state.staged[key]

    def _target(
        self,
        state: RunState,
        version: types_pb2.PolicyVersion,
        staged: trainer_pb2.StageWeightsResponse | None,
        expected: Callable[[], Awaitable[Logprobs]],
    ) -> Target:
        way = _way(state, version)
        return Target(state.run, version, state.transport, staged, expected, state.probe, way)

    async def _ask_trainer(self, state: RunState) -> Logprobs:
        sequences = state.probe.sequences
        if not sequences:
            return []
        question = probe.request(state.run, sequences, state.probe.temperature)
        return probe.read(await self._trainer.Score(question), sequences, where="trainer")

    async def _bring(self, state: RunState, target: Target, members: Sequence[Member]) -> list[Outcome]:
        await asyncio.gather(*(self._mark_updating(member) for member in members))
        outcomes = await asyncio.gather(*(self._bring_one(state, target, member) for member in members))
        for outcome in outcomes:
            if outcome.error is not None:
                await self._set_aside(outcome)
        return list(outcomes)

    async def _bring_one(self, state: RunState, target: Target, member: Member) -> Outcome:
        """The cycle of one engine, given up as soon as its process is gone (its calls would wait for it)."""
        work = asyncio.ensure_future(self._cycle(member).bring(target, state.ledger.next_generation))
        try:
            while not work.done():
                if self._roster.gone(member.engine):
                    error = NotReady(
                        "Its process is gone", where=f"engine {member.engine}", reason="ENGINE_GONE"
                    )
                    return Outcome(member.engine, error=error, touched=True)
                await asyncio.wait([work], timeout=GONE_CHECK_SECONDS)
            return work.result()
        finally:
            work.cancel()

    async def _mark_updating(self, member: Member) -> None:
        # A committed version of before is void from the first byte on; the router must not see it.
        if self._roster.get(member.engine) is not None:
            await self._roster.set_state(member.engine, UPDATING)

    def _cycle(self, member: Member) -> EngineCycle:
        return EngineCycle(member.engine, member.info.address, self._gate, self._settings)

    async def _set_aside(self, outcome: Outcome) -> None:
        """An engine that failed: its gate stays closed."""
        self._log.error(
            "engine failed to update",
            engine=outcome.engine,
            error=str(outcome.error),
            failures=[check.name for check in outcome.failures],
        )
        state = QUARANTINED if outcome.touched or not _transient(outcome.error) else JOINING
        member = self._roster.get(outcome.engine)
        if member is not None:
            member.retry_at = asyncio.get_running_loop().time() + self._settings.sync_retry_seconds
            await self._roster.set_state(outcome.engine, state, str(outcome.error))

    def _need_enough(
        self, state: RunState, version: types_pb2.PolicyVersion, outcomes: Sequence[Outcome]
    ) -> None:
        good = sum(outcome.error is None for outcome in outcomes)
        if good >= state.min_engines:
            return
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        hard = [error for error in errors if not _transient(error)]
        text = (
            f"{text_of(version)} is not committed: {good} of {state.min_engines} engines hold it; "
            + "; ".join(str(error) for error in (hard or errors))
        )
        if hard:
            raise Refused(text, where=f"run {state.run}", reason=hard[0].reason)
        raise NotReady(text, where=f"run {state.run}", reason="ENGINES_FAILED")

    async def _commit(
        self,
        state: RunState,
        record: refit_pb2.VersionRecord,
        target: Target,
        outcomes: Sequence[Outcome],
        phases: Phases,
    ) -> None:
        expected = await target.expected()
        plan = state.plan or plan_of(target.staged)
        previous = state.committed.record if state.committed is not None else None
        with phases.phase("ledger"):
            record.engines.extend(outcome.to_proto() for outcome in outcomes)
            state.committed = await state.ledger.commit(state.epoch, record, expected, plan, previous)
            del record.engines[:]
            state.plan = plan
        await self._roster.committed(record.version)
        await self._finish(target, outcomes)

    async def _finish(self, target: Target, outcomes: Sequence[Outcome]) -> None:
        """Commit on each engine that answered rightly, and let turns in."""
        good = [outcome for outcome in outcomes if outcome.error is None]
        await asyncio.gather(*(self._finish_one(target, outcome) for outcome in good))

    async def _finish_one(self, target: Target, outcome: Outcome) -> None:
        member = self._roster.get(outcome.engine)
        try:
            if member is None:
                raise NotFound(f"Engine {outcome.engine} has left the roster")
            await self._cycle(member).commit(target, outcome)
            await self._roster.set_state(outcome.engine, SERVING, "", target.version)
            await self._gate.open(outcome.engine)
        except HeadraceError as exc:
            # It holds the right weights, but we do not know whether it says so: a full cycle settles it.
            outcome.error, outcome.touched = exc, False
            await self._rejoin(outcome)

    async def _rejoin(self, outcome: Outcome) -> None:
        self._log.warning("engine could not be committed", engine=outcome.engine, error=str(outcome.error))
        if self._roster.get(outcome.engine) is not None:
            await self._roster.set_state(outcome.engine, JOINING, str(outcome.error))

    async def _failed(
        self, state: RunState, record: refit_pb2.VersionRecord, outcomes: Sequence[Outcome]
    ) -> None:
        """Nothing was committed: say so in the ledger, free the bytes, park the engines that held on."""
        if state.committed is not None and key_of(state.committed.version) == key_of(record.version):
            return
        del record.engines[:]
        record.engines.extend(outcome.to_proto() for outcome in outcomes)
        held = [member for member in self._roster.members if member.state == UPDATING]
        for member in held:
            await self._roster.set_state(member.engine, QUARANTINED, "its version was not committed")
        way = _way(state, record.version)
        await asyncio.gather(*(self._cycle(member).abandon(way) for member in held))
        await self._release(state, record.version)
        try:
            await state.ledger.record(state.epoch, record, FAILED)
        except HeadraceError as exc:
            self._log.warning("the failure could not be recorded", error=str(exc))

    async def _release(self, state: RunState, version: types_pb2.PolicyVersion) -> None:
        if state.staged.pop(key_of(version), None) is None and key_of(version) == BASE:
            return
        request = trainer_pb2.ReleaseWeightsRequest(run=state.run, version=make(key_of(version)))
        try:
            await self._trainer.ReleaseWeights(request, timeout=5)
        except HeadraceError as exc:
            # The trainer drops the oldest version by itself when it stages the next but one.
            self._log.warning("old weights were not released", version=text_of(version), error=str(exc))

    async def _repeat(self, state: RunState, committed: Committed) -> refit_pb2.PublishResponse:
        """The committed version again: bring those engines to it that do not hold it."""
        members = eligible(self._roster.members, state.run)
        behind = [m for m in members if m.state != SERVING]
        outcomes: list[Outcome] = []
        if behind:
            staged = await self._staged(state, committed.version, 0, Phases())
            target = self._target(state, committed.version, staged, _known(committed.expected))
            outcomes = await self._bring(state, target, behind)
            await self._finish(target, outcomes)
        serving = [m for m in eligible(self._roster.members, state.run) if m.state == SERVING]
        if len(serving) < state.min_engines:
            self._need_serving(state, committed.version, outcomes)
        response = _response(committed.record, sum(outcome.carried for outcome in outcomes))
        del response.engines[:]
        response.engines.extend(outcome.to_proto() for outcome in outcomes)
        done = {outcome.engine for outcome in outcomes}
        response.engines.extend(
            refit_pb2.EngineRefit(engine=m.engine, committed=True) for m in serving if m.engine not in done
        )
        return response

    def _need_serving(
        self, state: RunState, version: types_pb2.PolicyVersion, outcomes: Sequence[Outcome]
    ) -> None:
        if any(outcome.error is not None for outcome in outcomes):
            self._need_enough(state, version, outcomes)
        raise NotReady(
            f"Too few engines hold {text_of(version)}",
            where=f"run {state.run}",
            do="Wait until the engines have started.",
            reason="NOT_ENOUGH_ENGINES",
        )


def _fence(state: RunState, step: int) -> types_pb2.Fence:
    return types_pb2.Fence(epoch=state.epoch, step=step)


def _transient(error: HeadraceError | None) -> bool:
    return error is not None and (error.code.name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"))


def _once(ask: Callable[[], Awaitable[Logprobs]]) -> Callable[[], Awaitable[Logprobs]]:
    """Ask at most once; engines that run side by side share the answer."""
    task: asyncio.Future[Logprobs] = asyncio.ensure_future(ask())
    # An unawaited failure (no engine got as far as the probe) is not an error of its own.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def answer() -> Logprobs:
        return await asyncio.shield(task)

    return answer


def _known(expected: Logprobs) -> Callable[[], Awaitable[Logprobs]]:
    async def answer() -> Logprobs:
        return expected

    return answer


def _way(state: RunState, version: types_pb2.PolicyVersion) -> Way:
    if not state.in_flight:
        return DRAINED
    before = state.committed.version.incarnation if state.committed is not None else version.incarnation
    if before != version.incarnation:
        return Way(rollout_pb2.PAUSE_MODE_ABORT)
    return Way(rollout_pb2.PAUSE_MODE_KEEP, clear_cache=state.recompute_kv_cache)


def _measure(record: refit_pb2.VersionRecord) -> None:
    metrics.record_all(metrics.refit_seconds, record.seconds, "phase")
    metrics.refit_bytes.add(record.nbytes)
    metrics.refit_version.set(record.version.number)


def _seconds(phases: Phases, outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {**slowest(outcome.phases.seconds for outcome in outcomes), **phases.seconds}


def _response(record: refit_pb2.VersionRecord, carried: int) -> refit_pb2.PublishResponse:
    return refit_pb2.PublishResponse(
        version=record.version,
        engines=record.engines,
        nbytes=record.nbytes,
        seconds=record.seconds,
        turns_carried=carried,
    )
