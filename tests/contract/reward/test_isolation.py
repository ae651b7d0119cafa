"""Verifiers that hang, crash, lie or eat memory: killed in time, reported, and the pool goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from protos.headrace.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from services.runtime import rpc

VERIFIER_ERROR = types_pb2.OUTCOME_VERIFIER_ERROR


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("hang", "took longer than 0.5 s"),
        ("spin", "took longer than 0.5 s"),
        ("crash", "died"),
        ("raise", "no such drawer"),
        ("nan", "not finite"),
        ("eat", "MemoryError"),
    ],
)
async def test_a_bad_verifier_is_an_error_and_the_pool_goes_on(rewards, make, users, answer, said):
    await rewards.setup(**users)
    (before,) = await rewards.score(make.item("fine", verifier="behave"))
    assert before.reward.value == 1.0
    started = time.perf_counter()
    results = await rewards.score(
        make.item(answer, verifier="behave"),
        make.item("fine", verifier="behave"),
        make.item("4"),
    )
    assert results[0].failure.outcome == VERIFIER_ERROR
    assert said in results[0].failure.message
    assert [result.reward.value for result in results[1:]] == [1.0, 1.0]
    assert time.perf_counter() - started < 5


async def test_options_reach_the_verifier_and_async_ones_work(rewards, make, users):
    users["verifiers"]["length"]["options"]["per"] = 4
    await rewards.setup(**users)
    results = await rewards.score(make.item("abcdef", verifier="length"), make.item("x", verifier="later"))
    assert [result.reward.value for result in results] == [1.5, 0.5]


async def test_a_users_verifier_may_run_in_the_service_and_is_limited_there_too(rewards, make, users):
    users["verifiers"]["later"]["options"]["isolated"] = False
    await rewards.setup(verifiers={"later": users["verifiers"]["later"]})
    results = await rewards.score(make.item("x", verifier="later"), make.item("hang", verifier="later"))
    assert results[0].reward.value == 0.5
    assert "took longer than 0.5 s" in results[1].failure.message


async def test_nothing_is_started_before_it_is_needed(rewards, make, users):
    await rewards.setup(default_verifier="exact_answer")
    await rewards.score(make.item("4"))
    assert rewards.app.pool.pids == []


async def test_what_a_killed_verifier_has_started_goes_with_it(rewards, make, users, tmp_path):
    await rewards.setup(**users)
    note = tmp_path / "note"
    (result,) = await rewards.score(make.item("fork", verifier="behave", note=str(note)))
    assert "took longer" in result.failure.message
    await _gone([int(note.read_text().split()[1])])


async def test_waiting_in_vain_for_a_process_is_no_fault_of_the_verifier(rewards, make, users):
    users["verifiers"]["behave"]["timeout_s"] = 3
    await rewards.setup(**users)
    await rewards.score(make.item("fine", verifier="behave"))
    busy = asyncio.create_task(rewards.score(make.item("hang", verifier="behave")))
    await asyncio.sleep(0.1)
    (result,) = await rewards.score(make.item("fine", verifier="behave"), timeout=4.5)
    assert result.failure.outcome == types_pb2.OUTCOME_INFRASTRUCTURE_ERROR
    (hung,) = await busy
    assert hung.failure.outcome == VERIFIER_ERROR


async def test_a_caller_that_goes_away_does_not_shift_the_answers(rewards, make, users):
    users["verifiers"]["behave"]["timeout_s"] = 20
    await rewards.setup(**users)
    await rewards.score(make.item("fine", verifier="behave"))
    hung = asyncio.create_task(rewards.score(make.item("hang", verifier="behave")))
    await asyncio.sleep(0.2)
    hung.cancel()
    results = await rewards.score(*(make.item("x" * n, verifier="length") for n in (1, 2, 3)))
    assert [result.reward.value for result in results] == [1, 2, 3]


async def test_sigkill_of_the_service_leaves_no_verifier_process(make, users, tmp_path):
    ready = tmp_path / "ready.json"
    env = {
        **os.environ,
        "HEADRACE_HOME": str(tmp_path / "home"),
        "HEADRACE_REWARD_LISTEN": "127.0.0.1:0",
        "HEADRACE_REWARD_READY_FILE": str(ready),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())]),
    }
    code = "from reward_svc.service import main; raise SystemExit(main())"
    started = time.perf_counter()
    service = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    try:
        while not ready.exists():
            assert time.perf_counter() - started < 10
            await asyncio.sleep(0.02)
        address = json.loads(ready.read_text())["address"]
        stub = rpc.stub(reward_pb2_grpc.RewardsStub, address, name="reward")
        await stub.Setup(reward_pb2.RewardSetupRequest(run=make.run, env_json=json.dumps(users)))
        item = make.item("fine", verifier="behave")
        answer = await stub.Score(reward_pb2.ScoreRewardsRequest(run=make.run, items=[item]))
        assert answer.results[0].reward.value == 1.0
        children = [child.pid for child in psutil.Process(service.pid).children(recursive=True)]
        assert len(children) == 2
        os.kill(service.pid, signal.SIGKILL)
        await _gone(children)
    finally:
        service.kill()
        service.wait()
        await rpc.close_channels()


async def _gone(pids: list[int]) -> None:
    end = time.monotonic() + 5
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    ):
        assert time.monotonic() < end, f"still alive: {pids}"
        await asyncio.sleep(0.02)
