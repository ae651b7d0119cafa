"""Buffer replicas behind real gRPC, on a Redis of the tests' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from protos.headrace.v1.buffer_pb2_grpc import BufferStub
from services.buffer.service import BufferApp, BufferSettings
from services.runtime import tracing
from services.runtime.redis import connect_sync
from services.runtime.rpc import close_channels, stub
from services.runtime.server import RunningServer
from services.runtime.service import start_server
from tests.unit.buffer.conftest import RedisServer, redis_server

__all__ = ["redis_server"]

Replica = tuple[BufferStub, RunningServer]


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    client = connect_sync(redis_server.url)
    client.flushall()
    client.close()
    return redis_server.url


@pytest_asyncio.fixture
async def replica(redis_url: str, tmp_path: Path) -> AsyncIterator[Callable[[], Awaitable[Replica]]]:
    """Starts one more replica for each call."""
    running: list[RunningServer] = []
    tracing.setup("buffer", tmp_path)

    async def start() -> Replica:
        settings = BufferSettings(listen="127.0.0.1:0", redis_url=redis_url, home=tmp_path, drain_seconds=2.0)
        server = await start_server(BufferApp(settings), settings)
        running.append(server)
        return stub(BufferStub, server.address, name="buffer"), server

    yield start
    await close_channels()
    for server in running:
        await server.stop(0)
    tracing.setup("test", tmp_path)
