"""The stack's assignment and the lists for people, over real gRPC and replicas."""

from __future__ import annotations

import asyncio
import time

import pytest

from protos.headrace.v1 import buffer_pb2 as pb
from services.runtime.errors import InvalidInput
from tests.contract.buffer.test_service import Start, claim, lease, opened
from tests.unit.buffer.world import RUN, setup, spec, trajectory


def assigned(env: str = "{}") -> pb.BufferSetupRequest:
    request = setup()
    request.gym.CopyFrom(pb.GymAssignment(run=RUN, env_json=env, seed=3))
    return request


async def test_an_assignment_is_told_once_and_by_every_replica(replica: Start) -> None:
    (one, _), (two, _) = await replica(), await replica()
    assert not (await one.Assignment(pb.AssignmentRequest())).HasField("gym")
    waiting = asyncio.ensure_future(two.Assignment(pb.AssignmentRequest(wait_s=5)))
    await asyncio.sleep(0.1)
    await one.Setup(assigned())
    told = await waiting
    assert (told.gym.run, told.gym.seed) == (RUN, 3)
    await one.Setup(assigned())
    again = await two.Assignment(pb.AssignmentRequest(known_serial=told.serial, wait_s=0.2))
    assert again.serial == told.serial, "the same setup is no change"
    await one.Setup(assigned('{"max_turns": 3}'))
    assert (
        await two.Assignment(pb.AssignmentRequest(known_serial=told.serial, wait_s=2))
    ).serial > told.serial


async def test_a_release_ends_the_runs_own_assignment_alone(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(assigned())
    before = await buffer.Assignment(pb.AssignmentRequest())
    await buffer.Release(pb.ReleaseRequest(run="another"))
    assert (await buffer.Assignment(pb.AssignmentRequest())).serial == before.serial
    await buffer.Release(pb.ReleaseRequest(run=RUN))
    after = await buffer.Assignment(pb.AssignmentRequest())
    assert after.serial > before.serial
    assert not after.HasField("gym")


async def test_a_refusal_reaches_who_sets_up_and_ends_with_its_assignment(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(assigned())
    told = await buffer.Assignment(pb.AssignmentRequest())
    await buffer.Assignment(pb.AssignmentRequest(known_serial=told.serial - 1, refusal="late"))
    assert (await buffer.Setup(assigned())).gym_refusal == ""
    await buffer.Assignment(pb.AssignmentRequest(known_serial=told.serial, refusal="no such environment"))
    assert (await buffer.Setup(assigned())).gym_refusal == "no such environment"
    assert (await buffer.Setup(assigned('{"max_turns": 3}'))).gym_refusal == ""


async def test_a_wait_for_news_ends_by_its_time_and_with_the_drain(replica: Start) -> None:
    buffer, server = await replica()
    began = time.monotonic()
    await buffer.Assignment(pb.AssignmentRequest(wait_s=0.3))
    assert 0.2 < time.monotonic() - began < 2
    waiting = asyncio.ensure_future(buffer.Assignment(pb.AssignmentRequest(wait_s=15)))
    await asyncio.sleep(0.1)
    await server.stop(5)
    await asyncio.wait_for(waiting, 3)


async def test_groups_are_listed_by_page_and_state(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(*(spec(group) for group in range(5))))
    work = [each for each in (await buffer.Claim(claim())).work if each.key.group < 2]
    await buffer.Append(pb.AppendRequest(worker="w1", trajectories=[trajectory(w, reward=1) for w in work]))
    await buffer.Lease(lease(groups=2, wait_s=0.5))

    async def groups(**fields: object) -> list[pb.GroupSummary]:
        request = pb.ListGroupsRequest(run=RUN, book="train", **fields)  # type: ignore[arg-type]
        return list((await buffer.ListGroups(request)).groups)

    assert [g.group for g in await groups()] == [0, 1, 2, 3, 4]
    assert [g.group for g in await groups(newest=True, limit=2)] == [4, 3]
    assert [g.group for g in await groups(newest=True, from_group=2)] == [2, 1, 0]
    assert [g.group for g in await groups(from_group=1, limit=2)] == [1, 2]
    assert [g.group for g in await groups(state="open")] == [2, 3, 4]
    first, last = (await groups())[0], (await groups())[-1]
    assert (first.payloads, last.payloads) == (True, False)
    assert [s.reward for s in first.samples] == [1.0] * first.size
    with pytest.raises(InvalidInput, match="no state"):
        await groups(state="lost")
