"""Claims: heartbeats, losses, limits, draining."""

from __future__ import annotations

import asyncio

from protos.headrace.v1 import buffer_pb2, gym_pb2, types_pb2


async def test_held_claims_are_kept_alive_and_a_lost_one_is_dropped_at_once(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.extend([make.work(0), make.work(1)])
    await stack.setup()
    await stack.buffer.until(lambda: any(len(beat.claims) == 2 for beat in stack.buffer.beats))
    lost = next(claim for claim in stack.buffer.beats[-1].claims if claim.key.group == 0)
    stack.buffer.lost = [lost]
    await stack.buffer.until(lambda: stack.rollout.cancelled == 1)
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 1)
    await asyncio.sleep(0.1)
    assert [item.key.group for item in stack.buffer.appended] == [1]
    assert stack.buffer.failed == []
    status = await stack.gym.Status(gym_pb2.GymStatusRequest())
    assert (status.in_flight, status.completed, status.failed) == (0, 1, 0)


async def test_an_older_attempt_that_is_lost_leaves_the_newer_one_alone(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.append(make.work(0, attempt=2))
    await stack.setup()
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 1)
    stack.buffer.lost = [buffer_pb2.ClaimRef(key=make.work(0).key, attempt=1)]
    await stack.buffer.until(lambda: not stack.buffer.lost)
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 1)
    assert stack.buffer.appended[0].attempt == 2


async def test_a_newer_claim_of_the_same_sample_replaces_the_older(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.append(make.work(0, attempt=1))
    await stack.setup()
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 1)
    stack.buffer.queue.append(make.work(0, attempt=2))
    await stack.buffer.until(lambda: stack.rollout.cancelled == 1)
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 1)
    await asyncio.sleep(0.05)
    assert [item.attempt for item in stack.buffer.appended] == [2]


async def test_no_more_samples_are_claimed_than_there_are_slots(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.extend(make.work(group) for group in range(10))
    await stack.setup(concurrency=3)
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 3)
    await asyncio.sleep(0.1)
    assert len(stack.rollout.turns) == 3
    assert len(stack.buffer.queue) == 7
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 10)


async def test_rewards_and_appends_travel_in_batches(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.extend(make.work(group) for group in range(64))
    await stack.setup()
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 64)
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 64)
    assert len(stack.reward.calls) <= 16
    assert len(stack.buffer.claims) <= 16


async def test_release_finishes_what_is_in_flight_and_stops_claiming(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.append(make.work(0))
    await stack.setup()
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 1)
    release = asyncio.ensure_future(stack.gym.Release(gym_pb2.GymReleaseRequest(run=make.run)))
    await asyncio.sleep(0.05)
    stack.rollout.hold.set()
    await release
    assert len(stack.buffer.appended) == 1
    stack.buffer.queue.append(make.work(1))
    await asyncio.sleep(0.1)
    assert len(stack.buffer.queue) == 1
    status = await stack.gym.Status(gym_pb2.GymStatusRequest())
    assert status.run == ""


async def test_releasing_another_run_changes_nothing(stack, make):
    await stack.setup()
    await stack.gym.Release(gym_pb2.GymReleaseRequest(run="another"))
    await stack.buffer.until(lambda: len(stack.buffer.claims) > 0)
    assert (await stack.gym.Status(gym_pb2.GymStatusRequest())).run == make.run


async def test_a_repeated_setup_is_no_interruption(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.append(make.work(0))
    answer = await stack.setup()
    assert "multi_turn" in answer.agents
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 1)
    await stack.setup()
    stack.rollout.hold.set()
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 1)
    assert len(stack.rollout.turns) == 1


async def test_a_drain_gives_back_what_it_cannot_finish(stack, make):
    stack.rollout.hold = asyncio.Event()
    stack.buffer.queue.append(make.work(0))
    await stack.setup()
    await stack.buffer.until(lambda: len(stack.rollout.turns) == 1)
    await stack.server.stop(4)
    (failed,) = stack.buffer.failed
    assert failed.outcome == types_pb2.OUTCOME_INFRASTRUCTURE_ERROR
    assert "given back" in failed.message
    assert stack.buffer.appended == []


async def test_before_setup_nothing_is_claimed(stack, make):
    stack.buffer.queue.append(make.work(0))
    await asyncio.sleep(0.1)
    assert stack.buffer.claims == []
    assert (await stack.gym.Status(gym_pb2.GymStatusRequest())).run == ""
