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
from tests.e2e.rollout.conftest import RUN, turn

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
    await asyncio.sleep(0.1)
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


async def test_a_killed_host_leaves_nothing_behind(stack):
    tree = stack.host.tree()
    assert len(tree) >= 3
    os.kill(stack.host.process.pid, signal.SIGKILL)
    assert await gone(tree, 10)
