"""A Redis of the tests' own, and a store on it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions
from services.runtime.redis import connect, ping
from services.runtime.redis_server import find_server
from tests.unit.buffer.world import World


class RedisServer:
    """One redis-server process with an append-only file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/r.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [str(find_server()), "--port", "0", "--unixsocket", f"{self.folder}/r.sock", "--save", ""]
        argv += ["--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(self.folder)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        for _ in range(200):
            if ping(self.url, 0.2):
                return
            asyncio.run(asyncio.sleep(0.02))
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    # A short path: unix sockets allow about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="hr-buffer-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.kill()


@pytest_asyncio.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def world(redis: Redis) -> World:
    transitions = Transitions(redis)
    return World(transitions, Store(transitions), Steps(transitions))
