"""``headrace serve NAME``: every service answers health and reflection, is ready soon, and drains on SIGTERM.

Started one at a time, each with nobody to talk to: a service starts empty and waits for its peers.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from services.cli.roster import SERVICES
from tests.contract.serving import Served, serving

CONTRACT = {
    "controller": "Runs", "buffer": "Buffer", "gym": "Gym", "reward": "Rewards", "rollout": "Rollout",
    "engine": "Engine", "refit": "Refit", "trainer": "Trainer",
}  # fmt: skip
GRPC = [name for name in SERVICES if name != "gateway"]
LIGHT = [name for name in GRPC if name != "trainer"]
QUICK_S, LOADED_S, HEAVY_S, DRAIN_S = 3.0, 12.0, 90.0, 20.0
pytestmark = pytest.mark.timeout(150)


def check_contract(served: Served, name: str) -> None:
    """Health and reflection as a generic client asks for them."""
    full = f"headrace.v1.{CONTRACT[name]}"
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        live = health.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        assert live.status == health_pb2.HealthCheckResponse.SERVING
        known = health.Check(health_pb2.HealthCheckRequest(service=full), timeout=5)
        assert known.status in (
            health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING,
        )  # fmt: skip
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="headrace.v1.Nobody"), timeout=5)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        reflection = ProtoReflectionDescriptorDatabase(channel)
        listed = {found for found in reflection.get_services() if found.startswith("headrace.v1.")}
        assert listed == {full}
        described = reflection.FindFileContainingSymbol(full)
        methods = [
            m.name for service in described.service if service.name == CONTRACT[name] for m in service.method
        ]
        assert methods


def check_drain(served: Served) -> None:
    """SIGTERM ends the process with status 0, and everything that it had started."""
    children = [
        child for child in psutil.Process(served.process.pid).children(recursive=True) if _owned(child)
    ]
    began = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(DRAIN_S) == 0, served.log.read_text()
    print(f"drained in {time.monotonic() - began:.2f} s")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert "Traceback" not in served.log.read_text()


def _owned(child: psutil.Process) -> bool:
    # The embedded Redis belongs to all its users; its keeper leaves a few seconds after the last one.
    return "redis" not in " ".join(child.cmdline())


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_service(name: str, tmp_path: Path) -> None:
    with serving(name, tmp_path, LOADED_S) as served:
        print(f"{name} ready in {served.seconds:.2f} s, {served.cpu_s:.2f} s of CPU")
        check_contract(served, name)
        check_drain(served)
        # Wall time on a loaded machine says little; what the start costs is the same everywhere.
        assert min(served.seconds, served.cpu_s) < QUICK_S


@pytest.mark.slow
def test_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with serving("trainer", tmp_path, HEAVY_S) as served:
        print(f"trainer ready in {served.seconds:.2f} s")
        check_contract(served, "trainer")
        check_drain(served)


def test_every_service_of_the_contract_can_be_served() -> None:
    assert set(CONTRACT) == set(GRPC)
