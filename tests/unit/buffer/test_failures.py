"""Repeats, lost workers, failures within and beyond budgets: never lost, never counted twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.audit import audit_store
from services.buffer.fetch import fetch
from services.buffer.reclaim import reclaim_all
from services.runtime.errors import Fenced, InvalidInput, NotFound, NotReady, Refused
from tests.unit.buffer.world import PROMPT, RUN, World, spec, trajectory

ACCEPTED, DUPLICATE, STALE, INVALID = 1, 2, 3, 4
RETRY, DROPPED, FAIL_STALE = 1, 2, 3


def refs(*work: pb.Work) -> list[pb.ClaimRef]:
    return [pb.ClaimRef(key=w.key, attempt=w.attempt) for w in work]


async def expire(world: World, timeout_s: float = 0.03) -> tuple[int, int]:
    await asyncio.sleep(timeout_s * 1.5)
    return await reclaim_all(world.store, RUN)


async def balanced(world: World) -> None:
    verdict = await audit_store(world.do.redis, RUN)
    assert verdict.balanced, list(verdict.imbalances)


async def test_an_unknown_run_is_not_ready(world: World) -> None:
    with pytest.raises(NotReady) as found:
        await world.claim()
    assert found.value.reason == "NO_RUN"
    with pytest.raises(NotReady):
        await world.steps.progress(RUN, "train")
    with pytest.raises(NotFound):
        await audit_store(world.do.redis, RUN)


async def test_bad_names_are_refused(world: World) -> None:
    await world.setup()
    with pytest.raises(InvalidInput, match="no run id"):
        await world.store.claim("a{b}", "w", 1)
    with pytest.raises(InvalidInput, match="no book"):
        await world.open(spec(0), book="train:0")


async def test_setup_again_keeps_the_books(world: World) -> None:
    await world.setup()
    await world.open(spec(0), epoch=4)
    await world.setup(claim_timeout_s=5.0)
    with pytest.raises(Fenced):
        await world.open(spec(1), epoch=3)
    assert len(await world.claim()) == 4
    await balanced(world)


async def test_a_repeated_append_is_accepted_once(world: World) -> None:
    await world.setup()
    await world.open(spec(0))
    work = (await world.claim())[0]
    assert await world.append(trajectory(work)) == [ACCEPTED]
    assert await world.append(trajectory(work), trajectory(work)) == [ACCEPTED, ACCEPTED]
    progress = await world.steps.progress(RUN, "train")
    assert (progress.samples_done, progress.duplicates) == (1, 0)


async def test_a_late_append_of_a_dead_attempt_wins_or_is_duplicate(world: World) -> None:
    await world.setup(claim_timeout_s=0.03)
    await world.open(spec(0, samples=2))
    old = await world.claim(worker="dead")
    assert await expire(world) == (2, 0)
    new = await world.claim(worker="alive")
    assert [w.attempt for w in new] == [2, 2]
    # Sample 0: the dead attempt is first. Sample 1: the new one is.
    assert await world.append(trajectory(old[0], reward=0.25)) == [ACCEPTED]
    assert await world.append(trajectory(new[0]), trajectory(new[1], reward=0.75)) == [DUPLICATE, ACCEPTED]
    assert await world.append(trajectory(old[1])) == [DUPLICATE]
    await world.admit()
    manifest = (await world.lease()).manifest
    assert [(s.attempt, s.reward) for s in manifest.groups[0].samples] == [(1, 0.25), (2, 0.75)]
    progress = await world.steps.progress(RUN, "train")
    assert (progress.duplicates, progress.redeliveries, progress.samples_done) == (2, 2, 2)
    await balanced(world)


async def test_a_dead_attempt_may_win_while_its_sample_is_queued_again(world: World) -> None:
    await world.setup(claim_timeout_s=0.03)
    await world.open(spec(0, samples=1))
    old = await world.claim()
    await expire(world)
    assert await world.append(trajectory(old[0])) == [ACCEPTED]
    assert await world.claim() == []
    await balanced(world)


async def test_an_attempt_that_nobody_was_given_is_invalid(world: World) -> None:
    await world.setup()
    await world.open(spec(0))
    work = (await world.claim())[0]
    work.attempt = 2
    assert await world.append(trajectory(work)) == [INVALID]


async def test_a_heartbeat_keeps_a_claim_and_names_the_lost(world: World) -> None:
    await world.setup(claim_timeout_s=0.2)
    await world.open(spec(0, samples=3))
    work = await world.claim(worker="w1")
    for _ in range(4):
        await asyncio.sleep(0.08)
        assert await world.store.heartbeat(RUN, "w1", refs(*work[:2])) == []
        await reclaim_all(world.store, RUN)
    assert await world.store.heartbeat(RUN, "w1", refs(*work)) == refs(work[2])
    assert await world.store.heartbeat(RUN, "w2", refs(work[0])) == refs(work[0])
    again = await world.claim(worker="w2")
    assert [(w.key.sample, w.attempt) for w in again] == [(2, 2)]


async def test_returned_samples_come_before_new_ones(world: World) -> None:
    await world.setup()
    await world.open(spec(0, samples=2))
    work = await world.claim()
    await world.open(spec(1, samples=2))
    assert await world.fail(work[1]) == [RETRY]
    assert [(w.key.group, w.key.sample) for w in await world.claim()] == [(0, 1), (1, 0), (1, 1)]


async def test_budgets_are_apart_and_their_end_drops_the_group_with_its_siblings(world: World) -> None:
    await world.setup(infrastructure_attempts=3, data_attempts=2)
    await world.open(spec(0, samples=3), spec(1, samples=1))
    work = await world.claim(3)
    assert await world.append(trajectory(work[2])) == [ACCEPTED]
    sibling, bad = work[1], work[0]
    for outcome in (
        types.OUTCOME_INFRASTRUCTURE_ERROR,
        types.OUTCOME_ENVIRONMENT_ERROR,
        types.OUTCOME_CANCELLED,
    ):
        assert await world.fail(bad, outcome=outcome) == [RETRY], "still within both budgets"
        assert await world.fail(bad, outcome=outcome) == [RETRY], "a repeat gets the same answer"
        (bad,) = await world.claim(1)
    assert await world.fail(bad, outcome=types.OUTCOME_VERIFIER_ERROR) == [DROPPED]
    assert await world.fail(bad, outcome=types.OUTCOME_VERIFIER_ERROR) == [DROPPED]
    assert await world.append(trajectory(sibling)) == [STALE]
    assert await world.fail(sibling) == [FAIL_STALE]
    assert await world.store.heartbeat(RUN, "w1", refs(sibling)) == refs(sibling)
    (letter,) = await world.steps.dead_letters(RUN, 0)
    assert (letter.ref.key.sample, letter.ref.attempt, letter.outcome) == (0, 4, types.OUTCOME_VERIFIER_ERROR)
    progress = await world.steps.progress(RUN, "train")
    assert dict(progress.groups.dropped) == {"verifier_error": 1}
    assert dict(progress.samples.dropped) == {"verifier_error": 3}
    assert not await world.do.redis.keys("hr:*:[pt]:train:0*"), "payloads of a dropped group are gone"
    assert [w.key.group for w in await world.claim()] == [1], "no sample of it is handed out any more"
    await balanced(world)


async def test_expired_claims_end_as_dead_letters(world: World) -> None:
    await world.setup(claim_timeout_s=0.03, infrastructure_attempts=2)
    await world.open(spec(0, samples=1))
    await world.claim(worker="crashing")
    assert await expire(world) == (1, 0)
    await world.claim(worker="crashing")
    assert await expire(world) == (0, 1)
    (letter,) = await world.steps.dead_letters(RUN, 5)
    assert "crashing gave no heartbeat" in letter.message
    waiting = await world.lease()
    assert (waiting.missing, waiting.open) == (1, 0)
    await balanced(world)


async def test_minimum_siblings_lets_a_group_lose_some(world: World) -> None:
    await world.setup(data_attempts=1, minimum_siblings=2)
    await world.open(spec(0, samples=4), spec(1, samples=3))
    work = await world.claim()
    lost = types.OUTCOME_ENVIRONMENT_ERROR
    assert await world.fail(work[0], work[1], outcome=lost) == [DROPPED, DROPPED]
    assert await world.append(trajectory(work[2]), trajectory(work[3])) == [ACCEPTED, ACCEPTED]
    assert await world.fail(work[4], work[5], outcome=lost) == [DROPPED, DROPPED]
    assert await world.append(trajectory(work[6])) == [STALE]
    await world.admit()
    manifest = (await world.lease()).manifest
    assert [s.sample for s in manifest.groups[0].samples] == [2, 3]
    assert await world.commit() == (1, 2)
    samples = (await world.steps.progress(RUN, "train")).samples
    assert (samples.dispatched, samples.trained, samples.open, dict(samples.dropped)) == (
        7, 2, 0, {"environment_error": 5},
    )  # fmt: skip
    await balanced(world)


async def test_an_invalid_trajectory_costs_a_data_attempt(world: World) -> None:
    await world.setup(data_attempts=2)
    await world.open(spec(0, samples=1))
    for attempt in (1, 2):
        (work,) = await world.claim()
        broken = trajectory(work)
        broken.columns[3].data = b"\1"
        assert work.attempt == attempt
        results = await world.store.append(RUN, [broken])
        assert results[0].status == INVALID
        assert "mask has 1 bytes" in results[0].message
    dropped = (await world.steps.progress(RUN, "train")).groups.dropped
    assert dict(dropped) == {"invalid_trajectory": 1}
    await balanced(world)


async def test_the_prompt_is_stored_once_and_every_sample_comes_back(world: World) -> None:
    await world.setup()
    await world.open(spec(0, samples=3))
    work = await world.claim()
    sent = [trajectory(work[0]), trajectory(work[1]), trajectory(work[2], prompt=(1, 2))]
    kept = [types.Trajectory.FromString(t.SerializeToString()) for t in sent]
    for t in sent:
        await world.append(t)
    stored = await world.do.redis.get(f"hr:{{{RUN}}}:p:train:0")
    assert stored == np.array(PROMPT, "<i4").tobytes()
    groups = [pb.TrajectoryGroup.FromString(g) async for g in fetch(world.do, RUN, "train", [0])]
    assert list(groups[0].trajectories) == kept


async def test_fetch_says_what_is_not_there(world: World) -> None:
    await world.setup()
    await world.open(spec(0))
    with pytest.raises(NotFound):
        [g async for g in fetch(world.do, RUN, "train", [7])]
    with pytest.raises(Refused, match="is open"):
        [g async for g in fetch(world.do, RUN, "train", [0])]
