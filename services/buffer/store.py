"""The workers' side of the books: dispatch, claim, heartbeat, append, fail and reclaim over the scripts.

Invariants: Redis holds all state, so any number of replicas may run; a trajectory is checked before
anything is written; a failed check counts as a data failure of its attempt and never as a reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer import keys, payload
from services.buffer.columns import Facts
from services.buffer.expired import Expired
from services.buffer.transitions import Transitions
from services.runtime.errors import InvalidInput
from services.runtime.redis_scripts import Argument

RECLAIM_BATCH = 256
MAX_GROUP_SAMPLES = 4096
_STATUS = {
    b"accepted": pb.APPEND_STATUS_ACCEPTED,
    b"duplicate": pb.APPEND_STATUS_DUPLICATE,
    b"stale": pb.APPEND_STATUS_STALE,
    b"unissued": pb.APPEND_STATUS_INVALID,
}
_DECISION = {
    b"retry": pb.FAIL_DECISION_RETRY,
    b"dropped": pb.FAIL_DECISION_DROPPED,
    b"stale": pb.FAIL_DECISION_STALE,
}
# An environment or a verifier that fails says something about the data; all else is the machinery's doing.
_REASONS = {
    types.OUTCOME_ENVIRONMENT_ERROR: ("data", "environment_error"),
    types.OUTCOME_VERIFIER_ERROR: ("data", "verifier_error"),
    types.OUTCOME_INFRASTRUCTURE_ERROR: ("infra", "infrastructure_error"),
    types.OUTCOME_CANCELLED: ("infra", "cancelled"),
}
INVALID = ("data", "invalid_trajectory")


@dataclass(slots=True)
class _Checked:
    """A trajectory that passed, at its place in the request."""

    at: int
    trajectory: types.Trajectory
    facts: Facts
    prompt: bytes


class Store:
    """What gym workers and the dispatch do, as atomic transitions."""

    def __init__(self, transitions: Transitions) -> None:
        self._do = transitions

    async def setup(self, request: pb.BufferSetupRequest) -> None:
        """Set the run's budgets and rules; raises InvalidInput when they make no sense."""
        if not request.infrastructure_attempts or not request.data_attempts or request.claim_timeout_s <= 0:
            raise InvalidInput(
                "Attempts and claim timeout must be positive",
                where="infrastructure_attempts, data_attempts, claim_timeout_s",
            )
        await self._do.call(
            request.run,
            "setup",
            request.infrastructure_attempts,
            request.data_attempts,
            max(1, round(request.claim_timeout_s * 1000)),
            int(request.drop_zero_variance),
            request.minimum_siblings,
            request.max_age if request.HasField("max_age") else "",
        )

    async def open_groups(self, request: pb.OpenGroupsRequest) -> tuple[int, int]:
        """Dispatch; returns groups (opened, existing). Raises Fenced, and Refused for a closed book."""
        args: list[Argument] = [keys.checked_book(request.book), request.fence.epoch]
        for spec in request.groups:
            if not 0 < spec.samples <= MAX_GROUP_SAMPLES:
                raise InvalidInput(f"Group {spec.group} has {spec.samples} samples", where="groups")
            roots = [context.SerializeToString() for context in spec.traces][: spec.samples]
            roots += [b""] * (spec.samples - len(roots))
            del spec.traces[:]
            args += [spec.group, spec.samples, spec.target_step, spec.SerializeToString(), *roots]
        reply = await self._do.call(request.run, "open", *args)
        return reply[1], reply[2]

    async def claim(self, run: str, worker: str, most: int) -> list[pb.Work]:
        """Up to ``most`` samples for ``worker``, in the order of dispatch, returned ones first."""
        _, raw_specs, claims = await self._do.call(run, "claim", worker, most)
        specs = [pb.GroupSpec.FromString(raw) for raw in raw_specs]
        return [_work(run, specs, *pair) for pair in zip(claims[::2], claims[1::2], strict=True)]

    async def heartbeat(self, run: str, worker: str, claims: Sequence[pb.ClaimRef]) -> list[pb.ClaimRef]:
        """Keep ``claims`` alive; returns those that are no longer the worker's."""
        args: list[Argument] = [worker]
        for ref in claims:
            args += _address(ref.key, ref.attempt)
        _, *kept = await self._do.call(run, "heartbeat", *args)
        return [ref for ref, alive in zip(claims, kept, strict=True) if not alive]

    async def append(self, run: str, trajectories: Sequence[types.Trajectory]) -> list[pb.AppendResult]:
        """Store finished trajectories of one run; one result for each. The trajectories are used up."""
        results = [pb.AppendResult(ref=pb.ClaimRef(key=t.key, attempt=t.attempt)) for t in trajectories]
        sound = []
        for at, trajectory in enumerate(trajectories):
            try:
                facts = payload.check(trajectory)
            except payload.InvalidTrajectory as exc:
                results[at].status, results[at].message = pb.APPEND_STATUS_INVALID, str(exc)
                continue
            sound.append(_Checked(at, trajectory, facts, payload.prompt_of(trajectory, facts)))
        await self._count_invalid(run, trajectories, results)
        for checked, status in zip(sound, await self._append_sound(run, sound), strict=True):
            results[checked.at].status = _STATUS[status]
            if status == b"unissued":
                results[checked.at].message = "this attempt was never handed out"
        return results

    async def fail(self, run: str, failures: Sequence[pb.FailedSample]) -> list[pb.FailDecision.ValueType]:
        """Decide about samples that ended without a trajectory. Raises InvalidInput for a usable outcome."""
        found = []
        for failure in failures:
            if failure.outcome not in _REASONS:
                name = types.Outcome.Name(failure.outcome)
                raise InvalidInput(f"{name} is no failure", where="failures.outcome", do="Use Append.")
            found.append((failure, _REASONS[failure.outcome]))
        return await self._fail(run, found)

    async def reclaim(self, run: str) -> list[Expired]:
        """Take back claims without a heartbeat, at most ``RECLAIM_BATCH``."""
        outcome = int(types.OUTCOME_INFRASTRUCTURE_ERROR)
        found = (await self._do.call(run, "reclaim", outcome, RECLAIM_BATCH))[1]
        return [Expired.read(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    async def _append_sound(self, run: str, sound: Sequence[_Checked]) -> list[bytes]:
        if not sound:
            return []
        prompts = await self._prompts(run, sound)
        args: list[Argument] = []
        for item in sound:
            key, trajectory = item.trajectory.key, item.trajectory
            args += _address(key, trajectory.attempt)
            args.append(payload.manifest_sample(trajectory, item.facts).SerializeToString())
            args.append(payload.sample_result(trajectory, item.facts).SerializeToString())
            args.append(payload.pack(trajectory, prompts[key.book, key.group]))
        _, *statuses = await self._do.call(run, "append", *args)
        return statuses

    async def _prompts(self, run: str, sound: Iterable[_Checked]) -> dict[tuple[str, int], bytes]:
        """The prompt that each group has, or has now."""
        offered = {(item.trajectory.key.book, item.trajectory.key.group): item.prompt for item in sound}
        wanted = [(where, prompt) for where, prompt in offered.items() if prompt]
        found = dict.fromkeys(offered, b"")
        if wanted:
            args = [part for (book, group), prompt in wanted for part in (book, group, prompt)]
            _, *prompts = await self._do.call(run, "prompt", *args)
            found.update({where: prompt for (where, _), prompt in zip(wanted, prompts, strict=True)})
        return found

    async def _count_invalid(
        self, run: str, trajectories: Sequence[types.Trajectory], results: Sequence[pb.AppendResult]
    ) -> None:
        found = []
        for trajectory, result in zip(trajectories, results, strict=True):
            if result.status != pb.APPEND_STATUS_INVALID:
                continue
            failure = pb.FailedSample(ref=result.ref, outcome=trajectory.outcome, message=result.message)
            found.append((failure, _REASONS.get(trajectory.outcome, INVALID)))
        if found:
            await self._fail(run, found)

    async def _fail(
        self, run: str, failures: Sequence[tuple[pb.FailedSample, tuple[str, str]]]
    ) -> list[pb.FailDecision.ValueType]:
        args: list[Argument] = []
        for failure, (kind, reason) in failures:
            args += _address(failure.ref.key, failure.ref.attempt)
            args += [kind, reason, int(failure.outcome), failure.message[:2000]]
        _, *decisions = await self._do.call(run, "fail", *args)
        return [_DECISION[decision] for decision in decisions]


def _address(key: types.SampleKey, attempt: int) -> list[Argument]:
    return [keys.checked_book(key.book), key.group, key.sample, attempt]


def _work(run: str, specs: Sequence[pb.GroupSpec], claim: bytes, trace: bytes) -> pb.Work:
    at, book, ordinal, sample, attempt, queued = claim.decode().split(" ")
    spec = specs[int(at)]
    return pb.Work(
        key=types.SampleKey(run=run, book=book, group=int(ordinal), sample=int(sample)),
        attempt=int(attempt),
        row_json=spec.row_json,
        row_source=spec.row_source,
        sampling=spec.sampling,
        run_seed=spec.run_seed,
        trace=types.TraceContext.FromString(trace),
        agent=spec.agent,
        queued_ns=int(queued),
    )
