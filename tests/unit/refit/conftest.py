"""A bridge with its peers on loopback: real Redis, real gRPC, fake trainer, router and engines."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, types_pb2
from refit_bridge.service import RefitApp
from refit_bridge.settings import RefitSettings
from services.runtime import redis, rpc
from services.runtime.server import RunningServer
from services.runtime.service import ServiceApp, start_server
from services.runtime.settings import ServiceSettings
from tests.unit.refit.fakes import SEQUENCES, FakeEngine, FakeRouter, FakeTrainer


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as home, redis.acquire(Path(home)) as handle:
        yield handle.url


class World:
    """Bridge and peers of one test; ``log`` is what they did, in order."""

    def __init__(self, redis_url: str, home: Path) -> None:
        self.log: list[str] = []
        self.run = "r"
        self.home = home
        self.redis_url = redis_url
        self.trainer = FakeTrainer(self.log)
        self.router = FakeRouter(self.log)
        self.engines: dict[str, FakeEngine] = {}
        self.servers: list[RunningServer] = []
        self.beats: dict[str, asyncio.Task[None]] = {}
        self.bridge: RunningServer

    async def serve(self, app: ServiceApp, settings: ServiceSettings | None = None) -> RunningServer:
        running = await start_server(app, settings or ServiceSettings(home=self.home, drain_seconds=0.2))
        self.servers.append(running)
        return running

    async def start(self, engines: int) -> None:
        trainer, router = await self.serve(self.trainer), await self.serve(self.router)
        self.settings = RefitSettings(
            home=self.home, redis_url=self.redis_url, listen="127.0.0.1:0", trainer=trainer.address,
            rollout=router.address, lost_after_seconds=1.0, heartbeat_seconds=0.1, sync_retry_seconds=0.1,
            drain_seconds=0.2,
        )  # fmt: skip
        await self.start_bridge()
        for i in range(engines):
            await self.add_engine(f"e{i}")

    async def start_bridge(self) -> None:
        self.bridge = await self.serve(RefitApp(self.settings), self.settings)
        self.stub = rpc.stub(refit_pb2_grpc.RefitStub, self.bridge.address, name="refit")

    async def stop_bridge(self) -> None:
        self.servers.remove(self.bridge)
        await self.bridge.stop()

    async def add_engine(self, name: str, engine: FakeEngine | None = None) -> FakeEngine:
        engine = engine or FakeEngine(self.log, name)
        engine.run = self.run
        engine.address = (await self.serve(engine)).address
        self.engines[name] = engine
        await self.beat(engine)
        self.beats[name] = asyncio.create_task(self._beat_for_ever(engine))
        return engine

    async def beat(self, engine: FakeEngine) -> None:
        await self.stub.RegisterEngine(refit_pb2.RegisterEngineRequest(info=engine.info()), timeout=5)

    async def leave(self, engine: str) -> None:
        await self.stub.DeregisterEngine(refit_pb2.DeregisterEngineRequest(engine=engine), timeout=5)

    async def _beat_for_ever(self, engine: FakeEngine) -> None:
        while True:
            await asyncio.sleep(0.1)
            try:
                await self.beat(engine)
            except Exception:  # noqa: BLE001 (the bridge may be down in a test; the next beat tells)
                continue

    async def setup(
        self, epoch: int = 1, min_engines: int = 1, tolerance: float = 1e-3, **more: bool
    ) -> None:
        await self.stub.Setup(
            refit_pb2.RefitSetupRequest(
                run=self.run, transport="shm", min_engines=min_engines, probe_sequences=SEQUENCES,
                probe_tolerance=tolerance, probe_temperature=1.0, fence=types_pb2.Fence(epoch=epoch),
                **more,
            ),
            timeout=10,
        )  # fmt: skip

    async def publish(
        self, number: int, *, incarnation: int = 0, epoch: int = 1, timeout: float = 20.0
    ) -> refit_pb2.PublishResponse:
        self.trainer.number = number
        return await self.stub.Publish(
            refit_pb2.PublishRequest(
                run=self.run, fence=types_pb2.Fence(epoch=epoch, step=number),
                version=types_pb2.PolicyVersion(incarnation=incarnation, number=number),
            ),
            timeout=timeout,
        )  # fmt: skip

    async def roster(self) -> dict[str, refit_pb2.RosterEntry]:
        async with self.stub.WatchRoster(refit_pb2.WatchRosterRequest(), timeout=5) as watch:
            async for roster in watch:
                return {entry.info.engine: entry for entry in roster.engines}
        raise AssertionError("no roster came")

    async def state(self, engine: str) -> str:
        entry = (await self.roster()).get(engine)
        name = "GONE" if entry is None else refit_pb2.EngineState.Name(entry.state)
        return name.removeprefix("ENGINE_STATE_")

    async def until_state(self, engine: str, wanted: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while (found := await self.state(engine)) != wanted:
            assert time.monotonic() < end, f"{engine} is {found}, not {wanted}: {self.log[-12:]}"
            await asyncio.sleep(0.03)

    async def versions(self) -> dict[tuple[int, int], str]:
        answer = await self.stub.ListVersions(refit_pb2.ListVersionsRequest(run=self.run), timeout=5)
        return {(r.version.incarnation, r.version.number): r.state for r in answer.versions}

    def of(self, engine: str) -> list[str]:
        return [line.removeprefix(f"{engine} ") for line in self.log if line.startswith(f"{engine} ")]

    async def close(self) -> None:
        for engine in self.engines.values():
            engine.hang.set()
        for task in self.beats.values():
            task.cancel()
        await asyncio.gather(*self.beats.values(), return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self.servers))
        await rpc.close_channels()


@pytest.fixture
async def world(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(redis_url, tmp_path)
    made.run = request.node.name.replace("[", "-").replace("]", "")
    try:
        await made.start(engines=2)
        yield made
    finally:
        await made.close()
