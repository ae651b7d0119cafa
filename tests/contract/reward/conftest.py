"""The reward service over gRPC, and a user's verifiers in a module of their own."""

from __future__ import annotations

import json
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos.headrace.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from reward_svc.service import RewardApp
from reward_svc.settings import RewardSettings
from services.runtime import rpc
from services.runtime.service import start_server

RUN = "run-1"
USERS = '''
import os, subprocess, sys, time

def length(item):
    return len(item.answer) / item.options.get("per", 1)

def behave(item):
    """Does what the answer says."""
    if item.answer == "hang":
        time.sleep(60)
    if item.answer == "spin":
        while True: pass
    if item.answer == "crash":
        os._exit(3)
    if item.answer == "raise":
        raise KeyError("no such drawer")
    if item.answer == "nan":
        return float("nan")
    if item.answer == "eat":
        return float(len(bytearray(64 << 30)))
    if item.answer == "fork":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("started", child.pid, file=open(item.row["note"], "w"), flush=True)
        time.sleep(60)
    print("noise on standard output")
    return 1.0

async def later(item):
    import asyncio
    await asyncio.sleep(60 if item.answer == "hang" else 0)
    return 0.5
'''


def item_of(answer: str, *, group: int = 0, verifier: str = "exact_answer", **row: Any) -> Any:
    return reward_pb2.RewardItem(
        key=types_pb2.SampleKey(run=RUN, book="train", group=group),
        verifier=verifier,
        row_json=json.dumps({"expected_answer": "4", **row}),
        messages=[
            types_pb2.Message(role="user", content="?"),
            types_pb2.Message(role="assistant", content=answer),
        ],
        outcome=types_pb2.OUTCOME_COMPLETED,
    )


class Rewards:
    """The running service and its stub."""

    def __init__(self, app: RewardApp, address: str) -> None:
        self.app = app
        self.stub = rpc.stub(reward_pb2_grpc.RewardsStub, address, name="reward")

    async def setup(self, **env: Any) -> None:
        await self.stub.Setup(reward_pb2.RewardSetupRequest(run=RUN, env_json=json.dumps(env)))

    async def score(self, *items: Any, timeout: float = 30) -> list[Any]:
        request = reward_pb2.ScoreRewardsRequest(run=RUN, items=items)
        return list((await self.stub.Score(request, timeout=timeout)).results)


@pytest.fixture
def make() -> Any:
    return types.SimpleNamespace(item=item_of, run=RUN)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An env section with the verifiers above, under a time limit of 0.5 s."""
    (tmp_path / "reward_test_plugin.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = {name: f"reward_test_plugin:{name}" for name in ("length", "behave", "later")}
    verifiers = {name: {"timeout_s": 0.5, "options": {"path": path}} for name, path in paths.items()}
    return {"verifiers": verifiers}


@pytest.fixture
async def rewards(tmp_path: Path) -> AsyncIterator[Rewards]:
    settings = RewardSettings(listen="127.0.0.1:0", home=tmp_path / "home", workers=1, drain_seconds=1)
    app = RewardApp(settings)
    server = await start_server(app, settings)
    try:
        yield Rewards(app, server.address)
    finally:
        await server.stop(0.5)
        await rpc.close_channels()


@pytest.fixture
async def math_rewards(rewards: Rewards) -> Rewards:
    """The service with math_verify warming up."""
    await rewards.setup(default_verifier="math_verify")
    return rewards
