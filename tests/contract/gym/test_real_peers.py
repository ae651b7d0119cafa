"""The gym between the real buffer (on a real Redis) and the real reward service; the policy is a fake."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gym_svc.service import GymApp
from gym_svc.settings import GymSettings
from protos.headrace.v1 import (
    buffer_pb2,
    buffer_pb2_grpc,
    gym_pb2,
    gym_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    types_pb2,
)
from reward_svc.service import RewardApp
from reward_svc.settings import RewardSettings
from services.buffer.service import BufferApp, BufferSettings
from services.runtime import rpc, tracing
from services.runtime.redis import ping
from services.runtime.redis_server import find_server
from services.runtime.service import start_server

ENV = json.dumps({"default_verifier": "exact_answer", "claim_timeout_s": 0.6})
SAMPLES = 4


@pytest.fixture
def redis_url() -> Any:
    with tempfile.TemporaryDirectory(prefix="hr-gym-") as folder:
        url = f"unix://{folder}/r.sock"
        argv = [str(find_server()), "--port", "0", "--unixsocket", f"{folder}/r.sock", "--dir", folder]
        process = subprocess.Popen([*argv, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 5
            while not ping(url, 0.2):
                assert time.monotonic() < end, "redis-server does not answer"
            yield url
        finally:
            process.kill()
            process.wait(10)


class Peers:
    """The services' addresses and stubs."""

    buffer: Any
    addresses: dict[str, str]
    policy: Any


@pytest.fixture
async def peers(redis_url: str, tmp_path: Path, make: Any) -> AsyncIterator[Peers]:
    tracing.setup("test", tmp_path)
    found = Peers()
    settings = BufferSettings(listen="127.0.0.1:0", home=tmp_path, redis_url=redis_url, drain_seconds=1)
    buffer = await start_server(BufferApp(settings), settings)
    reward_settings = RewardSettings(listen="127.0.0.1:0", home=tmp_path, drain_seconds=1)
    reward = await start_server(RewardApp(reward_settings), reward_settings)
    found.policy, policy, policy_at = await make.serve_policy()
    found.addresses = {"buffer": buffer.address, "reward": reward.address, "rollout": policy_at}
    found.buffer = rpc.stub(buffer_pb2_grpc.BufferStub, buffer.address, name="buffer")
    await found.buffer.Setup(
        buffer_pb2.BufferSetupRequest(
            run=make.run, infrastructure_attempts=5, data_attempts=2, claim_timeout_s=0.6
        )
    )
    judge = rpc.stub(reward_pb2_grpc.RewardsStub, reward.address, name="reward")
    await judge.Setup(reward_pb2.RewardSetupRequest(run=make.run, env_json=ENV))
    try:
        yield found
    finally:
        await asyncio.gather(buffer.stop(0.5), reward.stop(0.5), policy.stop(0))
        await rpc.close_channels()


async def open_groups(peers: Peers, make: Any, groups: int) -> None:
    specs = []
    for group in range(groups):
        work = make.work(group)
        roots = [f"00-{group * SAMPLES + sample + 1:032x}-{1:016x}-01" for sample in range(SAMPLES)]
        specs.append(
            buffer_pb2.GroupSpec(
                group=group,
                samples=SAMPLES,
                row_json=work.row_json,
                row_source=work.row_source,
                sampling=work.sampling,
                run_seed=7,
                agent=work.agent,
                traces=[types_pb2.TraceContext(traceparent=root) for root in roots],
            )
        )
    fence = types_pb2.Fence(epoch=1, step=0)
    await peers.buffer.OpenGroups(
        buffer_pb2.OpenGroupsRequest(run=make.run, book="train", fence=fence, groups=specs)
    )


async def lease(peers: Peers, make: Any, groups: int) -> Any:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = await peers.buffer.Lease(
            buffer_pb2.LeaseRequest(
                run=make.run, fence=types_pb2.Fence(epoch=1, step=0), groups=groups, version=3, wait_s=1
            )
        )
        if answer.HasField("manifest"):
            return answer.manifest
    raise AssertionError(f"not ready: {answer}")


async def test_every_sample_is_handed_in_once_and_its_spans_are_one_tree(peers, make, tmp_path):
    await open_groups(peers, make, 6)
    settings = GymSettings(listen="127.0.0.1:0", home=tmp_path, drain_seconds=4, **peers.addresses)
    server = await start_server(GymApp(settings), settings)
    gym = rpc.stub(gym_pb2_grpc.GymStub, server.address, name="gym")
    await gym.Setup(gym_pb2.GymSetupRequest(run=make.run, env_json=ENV))
    manifest = await lease(peers, make, 6)
    await server.stop(3.5)
    assert [group.group for group in manifest.groups] == list(range(6))
    samples = [sample for group in manifest.groups for sample in group.samples]
    assert len(samples) == 6 * SAMPLES
    assert {(sample.reward, sample.tokens, sample.sampled_tokens, sample.version) for sample in samples} == {
        (1.0, 5, 2, 3)
    }
    tracing.flush()
    spans = tracing.read_spans(tmp_path / "runs" / make.run)
    tree = [span for span in spans if int(span["trace_id"], 16) == 1]
    names = {span["span_id"]: span["name"] for span in tree}
    parents = {span["name"]: names.get(span["parent_id"], "dispatch") for span in tree}
    assert (
        parents.items()
        >= {
            "sample": "dispatch",
            "turn": "sample",
            "reward": "sample",
            "reward.score": "reward",
            "append": "sample",
            "buffer.append": "append",
        }.items()
    )


async def test_after_sigkill_of_a_worker_another_one_does_its_samples(peers, make, tmp_path):
    await open_groups(peers, make, 6)
    peers.policy.hold = asyncio.Event()
    first = await _gym_process(peers, make, tmp_path / "first")
    end = time.monotonic() + 10
    while len(peers.policy.turns) < 6 * SAMPLES:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    peers.policy.hold.set()
    second = await _gym_process(peers, make, tmp_path / "second")
    try:
        manifest = await lease(peers, make, 6)
    finally:
        second.kill()
        second.wait()
    attempts = Counter(sample.attempt for group in manifest.groups for sample in group.samples)
    assert attempts == {2: 6 * SAMPLES}
    progress = await peers.buffer.Progress(buffer_pb2.ProgressRequest(run=make.run, book="train"))
    assert progress.samples.dispatched == 6 * SAMPLES
    assert progress.redeliveries == 6 * SAMPLES


async def _gym_process(peers: Peers, make: Any, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    ready = folder / "ready.json"
    settings = {**peers.addresses, "listen": "127.0.0.1:0", "ready_file": str(ready)}
    env = {f"HEADRACE_GYM_{name.upper()}": value for name, value in settings.items()}
    env |= {"HEADRACE_HOME": str(folder), "PYTHONPATH": str(Path.cwd())}
    code = "from gym_svc.service import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **env}, stderr=subprocess.DEVNULL
    )
    started = time.monotonic()
    while not ready.exists():
        assert time.monotonic() - started < 10
        await asyncio.sleep(0.02)
    gym = rpc.stub(gym_pb2_grpc.GymStub, json.loads(ready.read_text())["address"], name="gym")
    await gym.Setup(gym_pb2.GymSetupRequest(run=make.run, env_json=ENV))
    return process
