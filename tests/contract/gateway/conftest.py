"""The real gateway over HTTP; behind it real controller, buffer and gym on a Redis of the tests' own.

Trainer, bridge and engines are not there: runs stay at their start, which is enough to talk about them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gym_svc.service import GymApp
from gym_svc.settings import GymSettings
from protos.headrace.v1 import buffer_pb2_grpc, runs_pb2_grpc
from services.buffer.service import BufferApp, BufferSettings
from services.controller.service import ControllerApp
from services.controller.settings import ControllerSettings
from services.gateway.service import serve
from services.gateway.settings import GatewaySettings
from services.runtime import rpc
from services.runtime.redis import connect_sync
from services.runtime.service import ServiceApp, start_server
from services.runtime.settings import ServiceSettings
from tests.unit.buffer.conftest import RedisServer, redis_server

__all__ = ["redis_server"]


@dataclass
class Stack:
    """What a test talks to."""

    http: httpx.AsyncClient
    runs: runs_pb2_grpc.RunsAsyncStub
    buffer: buffer_pb2_grpc.BufferAsyncStub
    controller: str
    settings: GatewaySettings


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@asynccontextmanager
async def gateway(folder: Path, **settings: Any) -> AsyncIterator[tuple[str, GatewaySettings]]:
    """The gateway on this loop; yields its base URL."""
    ready = folder / "gateway.json"
    found = GatewaySettings(listen="127.0.0.1:0", home=folder, ready_file=ready, drain_seconds=3, **settings)
    ended = asyncio.Event()
    task = asyncio.create_task(serve(found, ended))
    try:
        async with asyncio.timeout(15):
            while not ready.exists():
                if task.done():
                    task.result()
                await asyncio.sleep(0.01)
        yield f"http://{json.loads(ready.read_text())['address']}", found
    finally:
        ended.set()
        await asyncio.wait_for(task, 15)
    assert not ready.exists()


@asynccontextmanager
async def served(app: ServiceApp, settings: ServiceSettings) -> AsyncIterator[str]:
    """A service on this loop; yields its address."""
    server = await start_server(app, settings)
    try:
        yield server.address
    finally:
        await server.stop(1)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("gateway")
    client = connect_sync(redis_server.url)
    client.flushall()
    client.close()
    own: dict[str, Any] = {"listen": "127.0.0.1:0", "home": folder, "drain_seconds": 2}
    store = {"redis_url": redis_server.url, **own}
    peers = {name: nobody() for name in ("reward", "rollout", "trainer", "refit")}
    async with AsyncExitStack() as held:
        held.push_async_callback(rpc.close_channels)
        kept = BufferSettings(**store)
        peers["buffer"] = await held.enter_async_context(served(BufferApp(kept), kept))
        worker = GymSettings(**own, **{name: peers[name] for name in ("buffer", "reward", "rollout")})
        peers["gym"] = await held.enter_async_context(served(GymApp(worker), worker))
        known = {name: address for name, address in peers.items() if name in ControllerSettings.model_fields}
        settings = ControllerSettings(**store, **known)
        peers["controller"] = await held.enter_async_context(served(ControllerApp(settings), settings))
        base, found = await held.enter_async_context(gateway(folder, max_streams=2, **peers))
        http = await held.enter_async_context(httpx.AsyncClient(base_url=f"{base}/api/v1", timeout=20))
        runs = rpc.stub(runs_pb2_grpc.RunsStub, peers["controller"], name="controller")
        buffer = rpc.stub(buffer_pb2_grpc.BufferStub, peers["buffer"], name="buffer")
        yield Stack(http, runs, buffer, peers["controller"], found)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    row = {"responses_create_params": {"input": "1+1"}, "expected_answer": "2", "verifier": "exact_answer"}
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("".join(json.dumps({**row, "id": i}) + "\n" for i in range(10)))
    grpo = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 6, "seed": 7}
    grpo |= {"val_period": 0}
    return {
        "kind": "grpo", "name": "Through the door", "grpo": grpo,
        "policy": {"model_name": "m", "train_global_batch_size": 8},
        "data": {"train": {"data_path": str(rows)}},
        "stack": {"service_start_timeout_s": 120, "engine_start_timeout_s": 120},
    }  # fmt: skip
