"""Health, reflection, readiness, drain and the life of a served process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime import rpc
from services.runtime.errors import Cancelled, InvalidInput, NotReady
from services.runtime.ports import ReservedPort
from services.runtime.service import start_server
from services.runtime.settings import ServiceSettings

from .conftest import SERVICE, EchoApp, EchoStub  # noqa: TID252 (tests are no package)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = Path(__file__).parents[3]


async def check(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=2
        )
    return int(answer.status)


async def test_readiness_is_apart_from_liveness(settings: ServiceSettings) -> None:
    app = EchoApp()
    app.ready = False
    running = await start_server(app, settings)
    assert await check(running.address, "") == SERVING
    assert await check(running.address, SERVICE) == NOT_SERVING
    app.ready = True
    began = time.monotonic()
    threading.Thread(target=app.readiness_changed).start()
    while await check(running.address, SERVICE) != SERVING:
        assert time.monotonic() - began < 5
    app.ready = False  # found by polling
    await asyncio.sleep(0.4)
    assert await check(running.address, SERVICE) == NOT_SERVING
    await running.stop()


async def test_reflection_lists_the_service(settings: ServiceSettings) -> None:
    running = await start_server(EchoApp(), settings)
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = [answer async for answer in stub.ServerReflectionInfo(asked, timeout=2)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    await running.stop()


async def test_drain_finishes_calls_in_flight(settings: ServiceSettings, text: Any) -> None:
    entered = asyncio.Event()

    async def slow(request: StringValue, context: Any) -> StringValue:
        entered.set()
        await asyncio.sleep(0.5)
        return request

    app = EchoApp(Write=slow)
    running = await start_server(app, settings)
    stub = rpc.stub(EchoStub, running.address, name="echo")
    call = asyncio.create_task(stub.Write(text("kept")))
    await entered.wait()
    # A health watcher never ends by itself and must not hold the drain up.
    watcher = grpc.aio.insecure_channel(running.address)
    watching = health_pb2_grpc.HealthStub(watcher).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watching.read()).status == SERVING
    began = time.monotonic()
    stopping = asyncio.create_task(running.stop())
    assert (await watching.read()).status == NOT_SERVING
    with pytest.raises(NotReady):
        await stub.Write(text("refused"))
    assert (await call).value == "kept"
    await stopping
    assert time.monotonic() - began < 15
    assert app.stopped.is_set()
    assert app.calls["Write"] == 1
    await watcher.close()


async def test_drain_is_bounded(settings: ServiceSettings, text: Any) -> None:
    entered = asyncio.Event()

    async def forever(request: StringValue, context: Any) -> StringValue:
        entered.set()
        await asyncio.sleep(100)
        return request

    running = await start_server(EchoApp(Write=forever), settings)
    stub = rpc.stub(EchoStub, running.address, name="echo")
    call = asyncio.create_task(stub.Write(text("x"), timeout=50))
    await entered.wait()
    began = time.monotonic()
    await running.stop(0.3)
    assert time.monotonic() - began < 10
    with pytest.raises((Cancelled, NotReady)):
        await asyncio.wait_for(call, 2)


async def test_calls_wait_for_the_start(settings: ServiceSettings, text: Any, tmp_path: Path) -> None:
    async def say(request: StringValue, context: Any) -> StringValue:
        return request

    app = EchoApp(Say=say)
    begin = asyncio.Event()
    app.start = begin.wait  # type: ignore[method-assign,assignment]
    ready = tmp_path / "ready.json"
    with ReservedPort.free() as port:
        handed = settings.model_copy(
            update={"listen": port.address, "port_handed_over": True, "ready_file": ready}
        )
        starting = asyncio.create_task(start_server(app, handed))
        call = asyncio.create_task(rpc.stub(EchoStub, port.address, name="echo").Say(text("early")))
        await asyncio.sleep(0.3)
        assert await check(port.address, "") == SERVING
        assert not call.done()
        assert not ready.exists()
        begin.set()
        assert (await call).value == "early"
        running = await starting
        assert json.loads(ready.read_text()) == {"address": port.address, "pid": os.getpid()}
        await running.stop()


async def test_port_in_use_is_one_clear_error(settings: ServiceSettings) -> None:
    running = await start_server(EchoApp(), settings)
    taken = settings.model_copy(update={"listen": running.address})
    with pytest.raises(InvalidInput, match=running.address.split(":")[1]):
        await start_server(EchoApp(), taken)
    await running.stop()


SERVED = """
import asyncio, sys
from services.runtime.service import ServiceApp, serve
from services.runtime.settings import ServiceSettings
from services.runtime.errors import Internal
class App(ServiceApp):
    name = "sample"
    def register(self, server): return ["headrace.test.Nothing"]
    async def start(self):
        if "hang" in sys.argv: await asyncio.sleep(60)
        if "fail" in sys.argv: asyncio.get_running_loop().call_later(0.1, self.fail, Internal("engine died"))
raise SystemExit(serve(App(), ServiceSettings.load()))
"""


def start(tmp_path: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    settings = {"HEADRACE_HOME": str(tmp_path), "HEADRACE_SERVICE_READY_FILE": str(tmp_path / "ready"), **env}
    return subprocess.Popen(
        [sys.executable, "-c", SERVED, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    end = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def test_sigterm_drains_and_exits_0(tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(tmp_path)
    wait_for(tmp_path / "ready")
    assert time.monotonic() - began < 15
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert not (tmp_path / "ready").exists()
    assert [json.loads(line)["event"] for line in err.splitlines()][-1] == "stopped"


def test_sigterm_during_start_ends_the_process(tmp_path: Path) -> None:
    process = start(tmp_path, "hang")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 0


def test_app_that_cannot_go_on_exits_1(tmp_path: Path) -> None:
    process = start(tmp_path, "fail")
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "engine died" in err


def test_taken_port_exits_2_with_one_line(tmp_path: Path) -> None:
    with ReservedPort.free() as port:
        process = start(tmp_path, HEADRACE_SERVICE_LISTEN=port.address)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert f"Port {port.port} is in use" in err.splitlines()[-1]
    assert "Traceback" not in err
