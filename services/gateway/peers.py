"""The services behind the gateway: stubs only, shared by all requests."""

from __future__ import annotations

from protos.headrace.v1 import (
    buffer_pb2_grpc,
    refit_pb2_grpc,
    rollout_pb2_grpc,
    runs_pb2_grpc,
)
from services.gateway.settings import GatewaySettings
from services.runtime import rpc

CONTRACT = {
    "controller": "Runs", "buffer": "Buffer", "gym": "Gym", "reward": "Rewards", "rollout": "Rollout",
    "trainer": "Trainer", "refit": "Refit",
}  # fmt: skip
"""Service -> its gRPC service."""


class Peers:
    """Stubs of this event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.addresses = {name: str(getattr(settings, name)) for name in CONTRACT}
        self.runs: runs_pb2_grpc.RunsAsyncStub = rpc.stub(
            runs_pb2_grpc.RunsStub, settings.controller, name="controller"
        )
        self.buffer: buffer_pb2_grpc.BufferAsyncStub = rpc.stub(
            buffer_pb2_grpc.BufferStub, settings.buffer, name="buffer"
        )
        self.refit: refit_pb2_grpc.RefitAsyncStub = rpc.stub(
            refit_pb2_grpc.RefitStub, settings.refit, name="refit"
        )
        self.rollout: rollout_pb2_grpc.RolloutAsyncStub = rpc.stub(
            rollout_pb2_grpc.RolloutStub, settings.rollout, name="rollout"
        )
