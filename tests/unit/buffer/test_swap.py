"""ready_first: a straggler changes places with a ready group of a later step."""

from __future__ import annotations

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.audit import audit_store
from tests.unit.buffer.world import RUN, World, spec, trajectory

REWARDS = (0.0, 1.0)


async def two_steps(world: World, *, max_age: int = 1) -> list[pb.Work]:
    """Steps 0 and 1 of two groups each; group 0 is not done, everything else is ready."""
    await world.setup(max_age=max_age)
    await world.open(*(spec(g, samples=2, step=g // 2) for g in range(4)))
    work = await world.claim(64)
    done = [w for w in work if w.key.group != 0]
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in done])
    await world.admit()
    return [w for w in work if w.key.group == 0]


async def lease(world: World, step: int, *, ready_first: bool = True, version: int = 0) -> pb.LeaseResponse:
    order = pb.LEASE_ORDER_READY_FIRST if ready_first else pb.LEASE_ORDER_IN_ORDER
    fence = types.Fence(epoch=1, step=step)
    request = pb.LeaseRequest(run=RUN, fence=fence, groups=2, version=version, order=order)
    return await world.steps.lease(request)


def taken(answer: pb.LeaseResponse) -> list[int]:
    return [group.group for group in answer.manifest.groups]


async def balanced(world: World) -> None:
    audit = await audit_store(world.do.redis, RUN)
    assert audit.balanced, list(audit.imbalances)


async def test_in_order_a_straggler_blocks_its_step(world: World) -> None:
    await two_steps(world)
    answer = await lease(world, 0, ready_first=False)
    assert (taken(answer), answer.open) == ([], 1)


async def test_a_straggler_changes_places_and_is_trained_later(world: World) -> None:
    late = await two_steps(world, max_age=2)
    assert taken(await lease(world, 0)) == [1, 2]
    assert taken(await lease(world, 0)) == [1, 2], "the same step again, the same groups"
    await world.commit(0)
    waiting = await lease(world, 1, version=1)
    assert (taken(waiting), waiting.missing, waiting.open) == ([], 0, 1)
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in late])
    await world.admit()
    assert taken(await lease(world, 1, version=1)) == [0, 3]
    await world.commit(1)
    await balanced(world)


async def test_a_straggler_that_got_too_old_is_dropped_and_missed_at_its_new_step(world: World) -> None:
    late = await two_steps(world, max_age=1)
    assert taken(await lease(world, 0)) == [1, 2]
    await world.commit(0)
    await world.open(spec(4, samples=2, step=2), spec(5, samples=2, step=2))
    done = await world.claim(64)
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample], version=1) for w in done])
    await world.admit()
    assert taken(await lease(world, 1, version=1)) == [3, 4]
    await world.commit(1)
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in late])
    await world.admit()
    answer = await lease(world, 2, version=2)
    assert (taken(answer), answer.missing) == ([], 1)
    assert (await world.steps.progress(RUN, "train")).groups.dropped == {"age": 1}
    await balanced(world)


async def test_nothing_is_swapped_unless_the_step_becomes_complete(world: World) -> None:
    await world.setup(max_age=1)
    await world.open(*(spec(g, samples=2, step=g // 2) for g in range(4)))
    work = await world.claim(64)
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in work if w.key.group == 2])
    await world.admit()
    assert taken(await lease(world, 0)) == []
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in work if w.key.group != 2])
    await world.admit()
    assert taken(await lease(world, 0)) == [0, 1], "each group is where it was"
    await balanced(world)


async def test_a_restore_brings_swapped_groups_back_to_the_step_that_trained_them(world: World) -> None:
    late = await two_steps(world, max_age=2)
    await lease(world, 0)
    await world.commit(0)
    await world.steps.restore(RUN, types.Fence(epoch=2, step=0), 0)
    fence = types.Fence(epoch=2, step=0)
    order = pb.LEASE_ORDER_READY_FIRST
    answer = await world.steps.lease(pb.LeaseRequest(run=RUN, fence=fence, groups=2, order=order))
    assert taken(answer) == [1, 2]
    assert await world.append(*[trajectory(w, reward=1) for w in late]) == [1, 1], "it was not held back"
    await balanced(world)


async def test_a_surplus_straggler_stays_where_it_is(world: World) -> None:
    await world.setup(max_age=1)
    await world.open(*(spec(g, samples=2, step=0) for g in range(3)), spec(3, samples=2, step=1))
    work = await world.claim(64)
    await world.append(*[trajectory(w, reward=REWARDS[w.key.sample]) for w in work if w.key.group != 2])
    await world.admit()
    assert taken(await lease(world, 0)) == [0, 1]
    await world.commit(0)
    fence = types.Fence(epoch=1, step=1)
    request = pb.LeaseRequest(run=RUN, fence=fence, groups=1, version=1)
    assert taken(await world.steps.lease(request)) == [3], "it was not taken away from its step"
    await balanced(world)
