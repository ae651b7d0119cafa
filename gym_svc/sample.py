"""One sample, from its claim to its hand-in.

Invariants
- A sample ends in exactly one of: a trajectory handed in, a failure reported, or cancelled (claim lost).
- Only COMPLETED and TRUNCATED carry a reward; whatever goes wrong is reported by its kind.
- The seed of the environment depends on (run seed, group, sample), never on the attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass

from gym_svc.agent.base import Episode
from gym_svc.clients import Policy, Scorer
from gym_svc.config import EnvConfig
from gym_svc.failures import ENVIRONMENT, INFRASTRUCTURE, SampleError
from gym_svc.outbox import Outbox
from gym_svc.plans import Plan, Planner
from gym_svc.rows import Row, parse_row
from gym_svc.trajectory import Clock
from protos.headrace.v1 import buffer_pb2, reward_pb2, types_pb2
from services.runtime import metrics, tracing
from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.logs import bind_ids, get_logger

log = get_logger("gym")
ACCEPTED = buffer_pb2.APPEND_STATUS_ACCEPTED


@dataclass(frozen=True, slots=True)
class Bench:
    """What every sample of a run is worked on with."""

    run: str
    worker: str
    env: EnvConfig
    planner: Planner
    policy: Policy
    scorer: Scorer
    outbox: Outbox


async def play(bench: Bench, work: buffer_pb2.Work) -> bool:
    """Work on one claimed sample; True when a trajectory was accepted (or was there already)."""
    metrics.gym_in_flight.add(1)
    try:
        return await _play(bench, work)
    finally:
        metrics.gym_in_flight.add(-1)


async def _play(bench: Bench, work: buffer_pb2.Work) -> bool:
    key = work.key
    parent = tracing.context_from(work.trace.traceparent)
    attributes: dict[str, str | int] = {"headrace.book": key.book, "headrace.attempt": work.attempt}
    with (
        bind_ids(run=key.run, group=str(key.group), sample=key.sample),
        tracing.span("sample", parent=parent, attributes=attributes) as span,
    ):
        try:
            trajectory = await _make_in_time(bench, work)
            span.set_attribute("headrace.outcome", types_pb2.Outcome.Name(trajectory.outcome))
            _measure(trajectory)
            return await _hand_in(bench, trajectory)
        except SampleError as failed:
            span.set_attribute("headrace.outcome", types_pb2.Outcome.Name(failed.outcome))
            await report(bench.outbox, work, failed)
        except Exception as exc:
            log.exception("a sample failed unexpectedly")
            text = f"{type(exc).__name__}: {exc}"
            await report(bench.outbox, work, SampleError(INFRASTRUCTURE, text))
    return False


def _measure(trajectory: types_pb2.Trajectory) -> None:
    metrics.gym_samples.add(1, {"outcome": _outcome(trajectory.outcome)})
    timing = trajectory.timing
    for stage in ("queued", "generation", "environment", "reward"):
        metrics.gym_stage.record(getattr(timing, f"{stage}_s"), {"stage": stage})


def _outcome(outcome: types_pb2.Outcome.ValueType) -> str:
    return types_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


async def report(outbox: Outbox, work: buffer_pb2.Work, failed: SampleError) -> None:
    """Report a failure to the buffer; when even that fails, the claim expires."""
    name = types_pb2.Outcome.Name(failed.outcome)
    metrics.gym_samples.add(1, {"outcome": _outcome(failed.outcome)})
    log.warning("sample failed", outcome=name, attempt=work.attempt, error=failed.message)
    ref = buffer_pb2.ClaimRef(key=work.key, attempt=work.attempt)
    try:
        await outbox.fail(buffer_pb2.FailedSample(ref=ref, outcome=failed.outcome, message=failed.message))
    except HeadraceError as exc:
        log.error("failure not reported; the claim will expire", error=str(exc))


async def _make_in_time(bench: Bench, work: buffer_pb2.Work) -> types_pb2.Trajectory:
    """The trajectory within the run's limit for one attempt; a straggler is its environment's failure."""
    limit = bench.env.sample_timeout_s
    try:
        async with asyncio.timeout(limit) as clock:
            return await _make(bench, work)
    except TimeoutError as exc:
        if not clock.expired():
            raise
        raise SampleError(ENVIRONMENT, f"the sample took longer than {limit:g} s") from exc


async def _make(bench: Bench, work: buffer_pb2.Work) -> types_pb2.Trajectory:
    try:
        row = parse_row(work.row_json, work.row_source)
        plan = bench.planner.plan(row, work.agent.name or "single_turn")
        episode = _episode(bench, work, row, plan)
        await plan.agent.run(episode)
    except InvalidInput as exc:
        raise SampleError(ENVIRONMENT, str(exc)) from exc
    trajectory = _trajectory(bench, episode, plan)
    if plan.verifier:
        started = time.perf_counter()
        trajectory.reward.CopyFrom(await _score(bench, trajectory, work, plan.verifier))
        episode.clock.reward_s = time.perf_counter() - started
    trajectory.timing.CopyFrom(episode.clock.timing())
    return trajectory


def _episode(bench: Bench, work: buffer_pb2.Work, row: Row, plan: Plan) -> Episode:
    return Episode(
        work=work, row=row, policy=bench.policy, clock=Clock.start(work),
        open_environment=plan.open_environment, seed=environment_seed(work), max_turns=plan.max_turns,
        max_tokens=bench.env.max_total_sequence_length,
        environment_timeout_s=bench.env.environment_timeout_s, system_prompt=plan.system_prompt,
    )  # fmt: skip


def environment_seed(work: buffer_pb2.Work) -> int:
    """63 bits from run seed, group and sample."""
    text = f"{work.run_seed}:{work.key.book}:{work.key.group}:{work.key.sample}:environment"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _trajectory(bench: Bench, episode: Episode, plan: Plan) -> types_pb2.Trajectory:
    work = episode.work
    cut = episode.finish == types_pb2.FINISH_REASON_LENGTH
    return types_pb2.Trajectory(
        key=work.key, attempt=work.attempt, segments=episode.tokens.segments,
        outcome=types_pb2.OUTCOME_TRUNCATED if cut else types_pb2.OUTCOME_COMPLETED,
        columns=episode.tokens.columns(), finish_reason=episode.finish, agent=work.agent,
        environment=plan.environment, trace=work.trace, policy_versions=episode.versions,
        messages=episode.messages, turns=episode.turns, engine=episode.engine, worker=bench.worker,
    )  # fmt: skip


async def _score(
    bench: Bench, trajectory: types_pb2.Trajectory, work: buffer_pb2.Work, verifier: str
) -> types_pb2.Reward:
    with tracing.span("reward", attributes={"headrace.verifier": verifier}) as span:
        item = reward_pb2.RewardItem(
            key=work.key, verifier=verifier, row_json=work.row_json, messages=trajectory.messages,
            outcome=trajectory.outcome,
            trace=types_pb2.TraceContext(traceparent=tracing.current_traceparent()),
        )  # fmt: skip
        reward = await bench.scorer.score(item)
        span.set_attribute("headrace.reward", reward.value)
        return reward


async def _hand_in(bench: Bench, trajectory: types_pb2.Trajectory) -> bool:
    with tracing.span("append") as span:
        # The buffer's own span of this trajectory becomes a child of ours.
        trajectory.trace.traceparent = tracing.current_traceparent()
        try:
            result = await bench.outbox.append(trajectory)
        except HeadraceError as exc:
            raise SampleError(INFRASTRUCTURE, f"Buffer.Append: {exc}") from exc
        span.set_attribute("headrace.append", buffer_pb2.AppendStatus.Name(result.status))
    if result.status == buffer_pb2.APPEND_STATUS_UNSPECIFIED:
        raise SampleError(INFRASTRUCTURE, f"Buffer.Append: {result.message}")
    if result.status not in (ACCEPTED, buffer_pb2.APPEND_STATUS_DUPLICATE):
        status = buffer_pb2.AppendStatus.Name(result.status)
        log.warning("trajectory not taken", status=status, message=result.message)
        return False
    return True
