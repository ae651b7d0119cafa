"""Processes that are killed: the worker comes back as a new engine, and nothing outlives its host.

Last by name: it kills the engine that the other files share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from protos.headrace.v1 import rollout_pb2
from rollout_svc.turns.ids import ids_bytes
from services.runtime.errors import NotReady
from tests.e2e.rollout.conftest import RUN, Host, turn

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
]


def children(pid):
    return psutil.Process(pid).children(recursive=True)


async def gone(pids, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not left:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_killed_worker_comes_back_and_its_turn_is_repeated(stack):
    request = turn(["Before and after"], max_new_tokens=150)
    before = await stack.router.Turn(request)
    _, old = await stack.engine()
    (worker,) = psutil.Process(stack.host.process.pid).children()
    below = [child.pid for child in children(worker.pid)]
    assert below, "EngineCore is a child of the worker"

    interrupted = asyncio.create_task(stack.router.Turn(request, timeout=120))
    # As soon as it is there: a quiet machine is done with it within a tenth of a second.
    while not (await stack.router.Status(rollout_pb2.RolloutStatusRequest())).in_flight:
        await asyncio.sleep(0.001)
    os.kill(worker.pid, signal.SIGKILL)
    assert await gone(below, 5)
    fresh = await stack.roster.find(lambda info: info.ready and info.run == RUN and info.engine != old.engine)
    assert not fresh.HasField("version")

    engine, _ = await stack.engine()
    with pytest.raises(NotReady) as unserved:
        await engine.Turn(turn(["x"]), timeout=0.5)
    assert unserved.value.reason == "NO_VERSION"
    score = rollout_pb2.ScoreTokensRequest(run=RUN, sequences=[ids_bytes([5, 6, 7])], temperature=1.0)
    with pytest.raises(NotReady):
        await engine.Score(score, timeout=0.5)
    score.probe = True
    assert len((await engine.Score(score)).logprobs[0]) == 12

    await stack.commit()
    answer = await interrupted
    assert answer.engine == fresh.engine
    assert answer.rendered_ids == before.rendered_ids
    again = await stack.router.Turn(request)
    assert (again.sampled_ids, again.logprobs) == (answer.sampled_ids, answer.logprobs)


async def test_a_second_engine_joins_and_the_first_leaves_without_losing_a_turn(stack, tmp_path):
    _, first = await stack.engine()
    second = Host(tmp_path, stack.roster_address)
    old, stack.host = stack.host, second
    joined = await stack.roster.find(
        lambda info: info.ready and info.run == RUN and info.engine != first.engine, timeout=90
    )
    await stack.commit_on(joined)
    requests = [turn(["Spread"], group=200 + i, max_new_tokens=150) for i in range(8)]
    flying = [asyncio.create_task(stack.router.Turn(request, timeout=60)) for request in requests]
    while not (await stack.router.Status(rollout_pb2.RolloutStatusRequest())).in_flight:
        await asyncio.sleep(0.001)
    old.process.terminate()
    left = time.monotonic()
    while first.engine in stack.roster.infos:
        assert time.monotonic() - left < 3, "an engine that leaves says so first"
        await asyncio.sleep(0.02)
    answers = await asyncio.gather(*flying)
    # Who was at the first one in time is answered there, the others by the one that stays.
    assert {answer.engine for answer in answers} <= {first.engine, joined.engine}
    # The same turn is the same on the other engine.
    again = [await stack.router.Turn(request, timeout=60) for request in requests]
    assert {answer.engine for answer in again} == {joined.engine}
    assert [answer.sampled_ids for answer in again] == [answer.sampled_ids for answer in answers]
    assert await asyncio.to_thread(old.process.wait, 20) == 0


async def test_a_killed_host_leaves_nothing_behind(stack):
    tree = stack.host.tree()
    assert len(tree) >= 3
    os.kill(stack.host.process.pid, signal.SIGKILL)
    assert await gone(tree, 10)
