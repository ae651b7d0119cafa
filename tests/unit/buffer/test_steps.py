"""The step loop's side: order, fences, durability, restore, validation books."""

from __future__ import annotations

import pytest

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.audit import audit_store
from services.buffer.fetch import fetch
from services.runtime.errors import Fenced, InvalidInput, Refused
from tests.unit.buffer.world import RUN, World, spec, trajectory


def groups_of(response: pb.LeaseResponse) -> list[int]:
    return [group.group for group in response.manifest.groups]


async def train(world: World, step: int, *groups: int, epoch: int = 1) -> None:
    await world.open(*[spec(g, step=step) for g in groups], epoch=epoch)
    await world.finish()
    assert groups_of(await world.lease(step, groups=len(groups), epoch=epoch)) == sorted(groups)
    await world.commit(step, epoch)


async def balanced(world: World) -> None:
    verdict = await audit_store(world.do.redis, RUN)
    assert verdict.balanced, list(verdict.imbalances)


async def test_a_step_takes_its_groups_by_ordinal_and_waits_for_stragglers(world: World) -> None:
    await world.setup()
    await world.open(spec(10, samples=1), spec(2, samples=1), spec(33, samples=1), spec(4, samples=1, step=1))
    work = {w.key.group: w for w in await world.claim()}
    await world.append(trajectory(work[33]), trajectory(work[10]), trajectory(work[4]))
    await world.admit()
    waiting = await world.lease(groups=2)
    assert not waiting.HasField("manifest"), "10 and 33 are ready, but 2 comes first"
    assert (waiting.ready, waiting.missing, waiting.open) == (2, 0, 1)
    await world.append(trajectory(work[2]))
    await world.admit()
    assert groups_of(await world.lease(groups=2)) == [2, 10]
    assert groups_of(await world.lease(step=1)) == [4]


async def test_a_dropped_group_is_missing_until_it_is_replaced(world: World) -> None:
    await world.setup(data_attempts=1)
    await world.open(spec(0), spec(1))
    work = await world.claim()
    await world.fail(work[0], outcome=types.OUTCOME_ENVIRONMENT_ERROR)
    await world.append(*[trajectory(w) for w in work[4:]])
    await world.admit()
    waiting = await world.lease(groups=2)
    assert (waiting.ready, waiting.missing, waiting.open) == (1, 1, 0)
    await world.open(spec(2))
    assert (await world.lease(groups=2)).missing == 0
    await world.finish()
    assert groups_of(await world.lease(groups=2)) == [1, 2]


async def test_groups_that_became_too_old_are_dropped_at_the_lease(world: World) -> None:
    await world.setup(max_age=1)
    await world.open(spec(0))
    await world.finish()
    waiting = await world.lease(version=2)
    assert (waiting.ready, waiting.missing) == (0, 1)
    assert dict((await world.steps.progress(RUN, "train")).groups.dropped) == {"age": 1}
    await balanced(world)


async def test_an_older_epoch_is_refused_everywhere_and_changes_nothing(world: World) -> None:
    await world.setup()
    await world.open(spec(0), epoch=5)
    await world.finish()
    old = types.Fence(epoch=4)
    before = await audit_store(world.do.redis, RUN)
    for call in (
        lambda: world.open(spec(1), epoch=4),
        lambda: world.lease(epoch=4),
        lambda: world.commit(epoch=4),
        lambda: world.steps.mark_durable(RUN, old),
        lambda: world.steps.restore(RUN, old, 0),
    ):
        with pytest.raises(Fenced) as found:
            await call()
        assert found.value.details["epoch"] == "5"
    assert await audit_store(world.do.redis, RUN) == before


async def test_a_newer_epoch_gets_the_same_manifest_and_fences_the_older(world: World) -> None:
    await world.setup()
    await world.open(spec(0), spec(1))
    await world.finish()
    first = await world.lease(groups=2, epoch=1)
    assert (await world.lease(groups=2, epoch=2)).manifest == first.manifest
    with pytest.raises(Fenced):
        await world.commit(epoch=1)
    assert await world.commit(epoch=2) == (2, 8)


async def test_a_step_that_was_not_leased_cannot_be_committed(world: World) -> None:
    await world.setup()
    await world.open(spec(0))
    await world.finish()
    with pytest.raises(Refused, match="no leased groups"):
        await world.commit()


async def test_restore_brings_later_steps_back_in_order_and_counts_each_once(world: World) -> None:
    await world.setup(drop_zero_variance=True, max_age=0)
    for step, groups in enumerate([(0, 1), (2, 3), (4, 5)]):
        await world.open(*[spec(g, step=step) for g in groups])
        work = await world.claim()
        await world.append(*[trajectory(w, reward=w.key.sample, version=step) for w in work])
        await world.admit()
        await world.lease(step, groups=2, version=step)
        if step < 2:
            await world.commit(step)
    assert await world.steps.mark_durable(RUN, types.Fence(epoch=1, step=0)) == 2
    # The trainer is back at one completed step: step 1 was trained, step 2 leased.
    fence = types.Fence(epoch=2, step=1)
    assert await world.steps.restore(RUN, fence, 1) == 4
    assert await world.steps.restore(RUN, fence, 1) == 4
    assert (await world.steps.progress(RUN, "train")).groups.trained == 2
    for step, groups in ((1, [2, 3]), (2, [4, 5])):
        # They were admitted once: their age is not judged again.
        assert groups_of(await world.lease(step, groups=2, epoch=2, version=9)) == groups
        fetched = [pb.TrajectoryGroup.FromString(g) async for g in fetch(world.do, RUN, "train", groups)]
        assert [len(g.trajectories) for g in fetched] == [4, 4]
        assert await world.commit(step, epoch=2) == (2, 8)
    counts = (await world.steps.progress(RUN, "train")).groups
    assert (counts.dispatched, counts.trained, counts.open) == (6, 6, 0)
    await balanced(world)


async def test_restored_groups_go_before_surplus_ones(world: World) -> None:
    await world.setup()
    await train(world, 0, 5, 6)
    await world.open(spec(1))
    await world.finish()
    await world.steps.restore(RUN, types.Fence(epoch=2), 0)
    assert groups_of(await world.lease(groups=2, epoch=2)) == [5, 6]


async def test_durable_steps_cannot_be_restored(world: World) -> None:
    await world.setup()
    await train(world, 0, 0)
    await train(world, 1, 1)
    await world.steps.mark_durable(RUN, types.Fence(epoch=1, step=1))
    with pytest.raises(Refused, match="durable"):
        await world.steps.restore(RUN, types.Fence(epoch=2), 1)
    assert await world.steps.restore(RUN, types.Fence(epoch=2), 2) == 0
    with pytest.raises(Refused, match="durable"):
        [g async for g in fetch(world.do, RUN, "train", [0])]


async def test_drop_open_empties_a_book_in_any_state(world: World) -> None:
    await world.setup()
    await train(world, 0, 0)
    await world.open(*[spec(g, step=1) for g in range(1, 300)])
    work = await world.claim(40)
    await world.append(*[trajectory(w) for w in work[:20]])
    await world.admit()
    await world.lease(1, groups=1)
    assert await world.steps.drop_open(RUN, "train", "cancelled") == 299
    assert await world.steps.drop_open(RUN, "train", "cancelled") == 0
    assert await world.claim() == []
    progress = await world.steps.progress(RUN, "train")
    assert (progress.groups.open, progress.groups.trained, dict(progress.groups.dropped)) == (
        0, 1, {"cancelled": 299},
    )  # fmt: skip
    assert (progress.samples_queued, progress.samples_claimed) == (0, 0)
    with pytest.raises(InvalidInput):
        await world.steps.drop_open(RUN, "train", "")
    await balanced(world)


async def test_a_validation_book_gives_its_results_and_stays_closed(world: World) -> None:
    await world.setup(data_attempts=1)
    book = "validation/5"
    await world.open(*[spec(g, samples=2) for g in (7, 3, 9)], book=book)
    work = {(w.key.group, w.key.sample): w for w in await world.claim()}
    await world.append(
        *[trajectory(work[g, s], reward=g + s / 2) for g, s in work if g != 9 and (g, s) != (7, 1)]
    )
    await world.fail(work[7, 1], outcome=types.OUTCOME_VERIFIER_ERROR)
    await world.admit()
    closed = await world.steps.close_book(RUN, book)
    rewards = [(r.group, r.sample, r.reward if r.HasField("reward") else None) for r in closed.results]
    assert rewards == [(3, 0, 3.0), (3, 1, 3.5), (7, 0, 7.0), (7, 1, None), (9, 0, None), (9, 1, None)]
    assert [r.outcome for r in closed.results[3:]] == [
        types.OUTCOME_VERIFIER_ERROR, types.OUTCOME_CANCELLED, types.OUTCOME_CANCELLED,
    ]  # fmt: skip
    assert dict(closed.groups.dropped) == {"evaluated": 2, "book_closed": 1}
    assert (closed.samples.dispatched, closed.samples.open) == (6, 0)
    assert await world.steps.close_book(RUN, book) == closed
    assert await world.open(spec(3, samples=2), book=book) == (0, 1)
    with pytest.raises(Refused, match="closed"):
        await world.open(spec(4), book=book)
    assert not (await world.steps.close_book(RUN, "validation/6")).results, "nobody opened it"
    with pytest.raises(InvalidInput):
        await world.steps.close_book(RUN, "train")
    assert await world.append(trajectory(work[9, 0])) == [pb.APPEND_STATUS_STALE]
    await balanced(world)


async def test_restore_holds_back_open_groups_whose_version_is_undone(world: World) -> None:
    """Sampled at the restored version they would be too old for their step, and dropped."""
    await world.setup(max_age=0)
    await world.open(spec(0, step=1))
    held = await world.claim(2)
    done = await world.claim(1)
    await world.append(trajectory(done[0], version=1))
    await world.steps.restore(RUN, types.Fence(epoch=2, step=0), 0)
    await world.steps.restore(RUN, types.Fence(epoch=2, step=0), 0)
    assert await world.claim() == []
    assert await world.append(*[trajectory(w, version=0) for w in held]) == [pb.APPEND_STATUS_STALE] * 2
    await balanced(world)
    # Version 1 is there again: the step is opened as if for the first time.
    assert await world.open(spec(0, step=1), epoch=2) == (0, 1)
    again = await world.claim()
    assert sorted(w.key.sample for w in again) == [0, 1, 3]
    await world.append(*[trajectory(w, version=1) for w in again])
    await world.admit()
    assert groups_of(await world.lease(1, epoch=2, version=1)) == [0]
    await world.commit(1, epoch=2)
    await balanced(world)


async def test_restore_leaves_open_groups_alone_that_may_still_be_sampled(world: World) -> None:
    await world.setup(max_age=1)
    await world.open(spec(0, step=1), spec(1, step=2))
    await world.steps.restore(RUN, types.Fence(epoch=2, step=0), 0)
    assert {w.key.group for w in await world.claim()} == {0}
