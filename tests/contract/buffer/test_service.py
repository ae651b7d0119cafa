"""The Buffer contract over real gRPC: the whole road, long polls, replicas, frames, spans, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from protos.headrace.v1.buffer_pb2_grpc import BufferStub
from services.runtime import tracing
from services.runtime.chunks import CHUNK_BYTES, split
from services.runtime.errors import Fenced, InvalidInput, NotReady
from services.runtime.rpc import stub
from services.runtime.server import RunningServer
from tests.unit.buffer.world import RUN, setup, spec, trajectory

Start = Callable[[], Awaitable[tuple[BufferStub, RunningServer]]]


def opened(*specs: pb.GroupSpec, book: str = "train", epoch: int = 1) -> pb.OpenGroupsRequest:
    return pb.OpenGroupsRequest(run=RUN, book=book, fence=types.Fence(epoch=epoch), groups=specs)


def claim(most: int = 64, wait_s: float = 0.0, worker: str = "w1") -> pb.ClaimRequest:
    return pb.ClaimRequest(run=RUN, worker=worker, max_samples=most, wait_s=wait_s)


def lease(groups: int = 1, wait_s: float = 5.0, step: int = 0, epoch: int = 1) -> pb.LeaseRequest:
    fence = types.Fence(epoch=epoch, step=step)
    return pb.LeaseRequest(run=RUN, fence=fence, groups=groups, wait_s=wait_s)


async def fetched(buffer: BufferStub, *groups: int) -> list[pb.TrajectoryGroup]:
    found, data = [], b""
    async for chunk in buffer.Fetch(pb.FetchRequest(run=RUN, book="train", groups=groups)):
        assert 0 < len(chunk.data) <= CHUNK_BYTES
        data += chunk.data
        if chunk.last:
            found.append(pb.TrajectoryGroup.FromString(data))
            data = b""
    assert not data
    return found


async def test_the_road_of_a_group_with_admission_by_the_service(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    assert (await buffer.OpenGroups(opened(spec(0), spec(1)))).opened == 2
    work = (await buffer.Claim(claim())).work
    sent = [trajectory(w, reward=w.key.sample) for w in work]
    appended = await buffer.Append(pb.AppendRequest(worker="w1", trajectories=sent))
    assert {r.status for r in appended.results} == {pb.APPEND_STATUS_ACCEPTED}
    leased = await buffer.Lease(lease(groups=2))
    assert [g.group for g in leased.manifest.groups] == [0, 1]
    groups = await fetched(buffer, 1, 0)
    assert [t for g in groups for t in g.trajectories] == [*sent[4:], *sent[:4]]
    fence = types.Fence(epoch=1, step=0)
    assert (await buffer.Commit(pb.CommitRequest(run=RUN, fence=fence))).samples == 8
    assert (await buffer.MarkDurable(pb.MarkDurableRequest(run=RUN, fence=fence))).groups == 2
    progress = await buffer.Progress(pb.ProgressRequest(run=RUN, book="train"))
    assert (progress.groups.trained, progress.groups.open) == (2, 0)


async def test_errors_cross_the_wire_as_themselves(replica: Start) -> None:
    buffer, _ = await replica()
    with pytest.raises(NotReady) as unknown:
        await buffer.Claim(claim())
    assert unknown.value.reason == "NO_RUN"
    with pytest.raises(InvalidInput):
        await buffer.Setup(pb.BufferSetupRequest(run=RUN))
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(spec(0), epoch=3))
    with pytest.raises(Fenced, match="epoch 3"):
        await buffer.Lease(lease(epoch=2))
    with pytest.raises(InvalidInput):
        await buffer.Claim(pb.ClaimRequest(run=RUN))


async def test_a_waiting_claim_is_woken_here_and_by_another_replica(replica: Start) -> None:
    (first, _), (second, _) = await replica(), await replica()
    await first.Setup(setup())
    for group, opener in enumerate((first, second)):
        waiting = asyncio.create_task(_timed(first.Claim(claim(wait_s=5.0))))
        await asyncio.sleep(1.0)
        start = time.monotonic()
        await opener.OpenGroups(opened(spec(group)))
        response, end = await waiting
        assert len(response.work) == 4
        assert end - start < 2.0
    response, _ = await _timed(first.Claim(claim(wait_s=0.3)))
    assert not response.work


async def _timed(call: Awaitable[pb.ClaimResponse]) -> tuple[pb.ClaimResponse, float]:
    response = await call
    return response, time.monotonic()


async def test_a_lease_waits_for_the_last_sibling_and_ends_by_its_time(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(spec(0)))
    work = (await buffer.Claim(claim())).work
    start = time.monotonic()
    waiting = await buffer.Lease(lease(wait_s=0.4))
    assert 0.35 < time.monotonic() - start < 2.0
    assert (waiting.ready, waiting.missing, waiting.open) == (0, 0, 1)
    task = asyncio.create_task(buffer.Lease(lease(wait_s=10.0)))
    await asyncio.sleep(0.1)
    await buffer.Append(pb.AppendRequest(trajectories=[trajectory(w) for w in work]))
    assert (await asyncio.wait_for(task, 3.0)).HasField("manifest")


async def test_progress_waits_until_nothing_is_outstanding(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(spec(0, samples=2), book="validation/0"))
    work = (await buffer.Claim(claim())).work
    waiting = asyncio.create_task(
        buffer.Progress(pb.ProgressRequest(run=RUN, book="validation/0", wait_s=8.0))
    )
    await buffer.Append(pb.AppendRequest(trajectories=[trajectory(work[0])]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await buffer.Append(pb.AppendRequest(trajectories=[trajectory(work[1])]))
    assert (await asyncio.wait_for(waiting, 3.0)).samples_done == 2
    closed = await buffer.CloseBook(pb.CloseBookRequest(run=RUN, book="validation/0"))
    assert [result.reward for result in closed.results] == [1.0, 1.0]


async def test_a_silent_worker_loses_its_claims_to_another(replica: Start, tmp_path: Path) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup(claim_timeout_s=0.4))
    await buffer.OpenGroups(opened(spec(0, samples=2)))
    silent = (await buffer.Claim(claim(worker="silent"))).work
    again = (await buffer.Claim(claim(wait_s=5.0, worker="other"))).work
    assert [(w.key.sample, w.attempt) for w in again] == [(0, 2), (1, 2)]
    lost = (await buffer.Heartbeat(_beat("silent", silent))).lost
    assert len(lost) == 2
    assert not (await buffer.Heartbeat(_beat("other", again))).lost
    tracing.flush()
    spans = [s for s in tracing.read_spans(tmp_path / "runs" / RUN) if s["name"] == "buffer.reclaim"]
    told = {(s["trace_id"], s["attributes"]["headrace.attempt"], s["events"][0]["name"]) for s in spans}
    assert told == {(w.trace.traceparent.split("-")[1], 1, "claim expired") for w in silent}


def _beat(worker: str, work: list[pb.Work]) -> pb.HeartbeatRequest:
    claims = [pb.ClaimRef(key=w.key, attempt=w.attempt) for w in work]
    return pb.HeartbeatRequest(run=RUN, worker=worker, claims=claims)


async def test_failures_are_decided_in_order(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup(data_attempts=1))
    await buffer.OpenGroups(opened(spec(0, samples=1), spec(1, samples=1)))
    work = (await buffer.Claim(claim())).work
    outcomes = (types.OUTCOME_INFRASTRUCTURE_ERROR, types.OUTCOME_VERIFIER_ERROR)
    failures = [
        pb.FailedSample(ref=pb.ClaimRef(key=w.key, attempt=1), outcome=outcome, message="no")
        for w, outcome in zip(work, outcomes, strict=True)
    ]
    decided = await buffer.Fail(pb.FailRequest(worker="w1", failures=failures))
    assert list(decided.decisions) == [pb.FAIL_DECISION_RETRY, pb.FAIL_DECISION_DROPPED]
    letters = (await buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=RUN))).letters
    assert [letter.ref.key.group for letter in letters] == [1]


async def test_large_trajectories_travel_in_chunks_both_ways(replica: Start) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(spec(0, samples=2)))
    work = (await buffer.Claim(claim())).work
    sent = [trajectory(w, prompt=range(20_000), sampled=range(60_000)) for w in work]
    request = pb.AppendRequest(worker="w1", trajectories=sent).SerializeToString()

    async def chunks(data: bytes, *, finished: bool = True) -> AsyncIterator[types.Chunk]:
        parts = list(split(data))
        for number, part in enumerate(parts, start=1):
            yield types.Chunk(data=part, last=finished and number == len(parts))

    with pytest.raises(InvalidInput, match="before its last chunk"):
        await buffer.AppendStream(chunks(request, finished=False))
    results = (await buffer.AppendStream(chunks(request))).results
    assert [r.status for r in results] == [pb.APPEND_STATUS_ACCEPTED] * 2
    await buffer.Lease(lease())
    (group,) = await fetched(buffer, 0)
    assert list(group.trajectories) == sent


async def test_each_append_has_a_span_below_its_own_trajectory(replica: Start, tmp_path: Path) -> None:
    buffer, _ = await replica()
    await buffer.Setup(setup())
    await buffer.OpenGroups(opened(spec(0, samples=2)))
    work = (await buffer.Claim(claim())).work
    broken = trajectory(work[1])
    broken.ClearField("reward")
    await buffer.Append(pb.AppendRequest(trajectories=[trajectory(work[0]), broken]))
    tracing.flush()
    spans = [s for s in tracing.read_spans(tmp_path / "runs" / RUN) if s["name"] == "buffer.append"]
    parents = [w.trace.traceparent.split("-")[1:3] for w in work]
    found = {str(s["attributes"]["headrace.sample"]): s for s in spans}
    assert [[found[i]["trace_id"], found[i]["parent_id"]] for i in ("0", "1")] == parents
    statuses = [found[i]["attributes"]["headrace.append.status"] for i in ("0", "1")]
    assert statuses == ["accepted", "invalid"]


async def test_a_drain_answers_long_polls_at_once(replica: Start) -> None:
    buffer, server = await replica()
    await buffer.Setup(setup())
    health = stub(health_pb2_grpc.HealthStub, server.address, name="buffer")
    ready = health_pb2.HealthCheckRequest(service="headrace.v1.Buffer")
    for _ in range(20):
        if (await health.Check(ready)).status == health_pb2.HealthCheckResponse.SERVING:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the buffer does not become ready")
    waiting = asyncio.create_task(buffer.Claim(claim(wait_s=10.0)))
    await asyncio.sleep(0.3)
    start = time.monotonic()
    await server.stop(5.0)
    assert not (await waiting).work
    assert time.monotonic() - start < 2.0
