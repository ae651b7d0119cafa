"""Off loopback a service refuses to start without a token; with one it serves, and asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from protos.headrace.v1 import reward_pb2, reward_pb2_grpc
from services.cli.roster import SERVICES
from tests.contract.serving import serving

SECRET = "f3e1c0a8d2b94756-contract"


@pytest.mark.parametrize("name", list(SERVICES))
def test_off_loopback_without_a_token_it_exits_2(name: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    env |= {"HEADRACE_HOME": str(tmp_path), f"{SERVICES[name].prefix}LISTEN": "0.0.0.0:0"}
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "serve", name],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    told = (ended.stdout + ended.stderr).splitlines()
    assert ended.returncode == 2, told
    assert len(told) == 1
    assert f"{SERVICES[name].prefix}LISTEN" in told[0]
    assert "HEADRACE_TOKEN" in told[0]


def test_off_loopback_with_a_token_it_serves_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    with serving("reward", tmp_path, 30, host="0.0.0.0") as served:
        port = served.address.rpartition(":")[2]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = reward_pb2_grpc.RewardsStub(channel)
            request = reward_pb2.RewardSetupRequest(run="r", env_json="{}")
            with pytest.raises(grpc.RpcError) as caught:
                stub.Setup(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stub.Setup(request, timeout=10, metadata=(("authorization", f"Bearer {SECRET}"),))
    assert SECRET not in served.log.read_text()
