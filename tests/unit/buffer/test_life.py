"""One group from dispatch to durable, and every way in which calls are repeated on it."""

from __future__ import annotations

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.fetch import fetch
from tests.unit.buffer.world import RUN, World, spec, trajectory


async def test_a_group_is_dispatched_claimed_appended_trained_and_durable(world: World) -> None:
    await world.setup()
    assert await world.open(spec(3), spec(4)) == (2, 0)
    assert await world.open(spec(3), spec(5)) == (1, 1)
    work = await world.claim(5)
    assert [(w.key.group, w.key.sample) for w in work] == [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0)]
    assert {w.attempt for w in work} == {1}
    assert work[1].row_json == '{"q": 1}'
    assert work[1].trace.traceparent == spec(3).traces[1].traceparent
    sent = {w.key.sample: trajectory(w, reward=w.key.sample / 4) for w in work[:4]}
    kept = {s: types.Trajectory.FromString(t.SerializeToString()) for s, t in sent.items()}
    assert await world.append(*sent.values()) == [1, 1, 1, 1]
    assert await world.admit() == 1
    leased = await world.lease(groups=1)
    assert [g.group for g in leased.manifest.groups] == [3]
    sample = leased.manifest.groups[0].samples[2]
    assert (sample.tokens, sample.sampled_tokens, sample.reward, sample.version) == (7, 3, 0.5, 0)
    assert sample.trace.traceparent == spec(3).traces[2].traceparent
    assert (await world.lease(groups=1)).manifest == leased.manifest
    groups = [pb.TrajectoryGroup.FromString(g) async for g in fetch(world.do, RUN, "train", [3])]
    assert {t.key.sample: t for t in groups[0].trajectories} == kept
    assert await world.commit() == (1, 4)
    assert await world.commit() == (1, 4)
    assert await world.steps.mark_durable(RUN, types.Fence(epoch=1, step=0)) == 1
    assert await world.steps.mark_durable(RUN, types.Fence(epoch=1, step=0)) == 1
    assert (await world.lease(groups=1)).manifest == leased.manifest
    progress = await world.steps.progress(RUN, "train")
    assert (progress.groups.dispatched, progress.groups.trained, progress.groups.open) == (3, 1, 2)
    assert (progress.samples_queued, progress.samples_claimed, progress.samples_done) == (7, 1, 4)
    assert not await world.do.redis.keys("hr:*:t:train:3:*")
