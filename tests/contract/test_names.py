"""The names that the recipe's check knows are those that the gym and the reward service have."""

from __future__ import annotations

from pathlib import Path

import grpc

from protos.headrace.v1 import gym_pb2, gym_pb2_grpc, reward_pb2, reward_pb2_grpc
from services.recipe import names
from tests.contract.serving import serving


def test_verifiers(tmp_path: Path) -> None:
    with serving("reward", tmp_path, 30) as served, grpc.insecure_channel(served.address) as channel:
        stub = reward_pb2_grpc.RewardsStub(channel)
        answer = stub.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=10)
    assert {verifier.name for verifier in answer.verifiers} == set(names.VERIFIERS)


def test_agents_and_environments(tmp_path: Path) -> None:
    with serving("gym", tmp_path, 30) as served, grpc.insecure_channel(served.address) as channel:
        stub = gym_pb2_grpc.GymStub(channel)
        answer = stub.Setup(gym_pb2.GymSetupRequest(run="names", env_json="{}", concurrency=1), timeout=10)
    assert set(answer.agents) == set(names.AGENTS)
    assert set(answer.environments) == set(names.ENVIRONMENTS)
