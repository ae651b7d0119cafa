"""Samples per second through OpenGroups, Claim, Append, Lease, Fetch and Commit over gRPC.

Run it with ``taskset -c 0 python -m tests.contract.buffer.throughput``: client, buffer and Redis, three
processes, then share one core. Building the trajectories is not counted. On a busy machine the processor time
of each process says more than the clock.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from protos.headrace.v1.buffer_pb2_grpc import BufferStub
from services.buffer.audit import audit_store
from services.runtime.redis import connect
from services.runtime.rpc import close_channels, stub
from tests.contract.buffer.test_process import start
from tests.unit.buffer.conftest import RedisServer
from tests.unit.buffer.world import RUN, setup, spec, trajectory

GROUPS, SAMPLES, STEPS, BATCH = 32, 8, 20, 64


class Bench:
    """One controller, one worker and one trainer in turn, with the time of each phase."""

    def __init__(self, buffer: BufferStub) -> None:
        self.buffer = buffer
        self.seconds: Counter[str] = Counter()
        self.at = 0.0

    def phase(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self.at
        self.at = time.perf_counter()

    async def step(self, step: int) -> None:
        fence = types.Fence(epoch=1, step=step)
        row = '{"responses_create_params": {"input": [{"role": "user", "content": "1 + 2 ="}]}}'
        specs = [spec(step * GROUPS + g, samples=SAMPLES, step=step, row=row) for g in range(GROUPS)]
        self.at = time.perf_counter()
        await self.buffer.OpenGroups(pb.OpenGroupsRequest(run=RUN, book="train", fence=fence, groups=specs))
        self.phase("open")
        done = 0
        while done < GROUPS * SAMPLES:
            claimed = await self.buffer.Claim(pb.ClaimRequest(run=RUN, worker="w", max_samples=BATCH))
            self.phase("claim")
            done += len(claimed.work)
            batch = [
                trajectory(w, prompt=range(20), sampled=range(30), reward=w.key.sample % 2)
                for w in claimed.work
            ]
            self.phase("building (not counted)")
            await self.buffer.Append(pb.AppendRequest(worker="w", trajectories=batch))
            self.phase("append")
        lease = pb.LeaseRequest(run=RUN, fence=fence, groups=GROUPS, wait_s=10.0)
        manifest = (await self.buffer.Lease(lease)).manifest
        self.phase("lease")
        ordinals = [group.group for group in manifest.groups]
        async for chunk in self.buffer.Fetch(pb.FetchRequest(run=RUN, book="train", groups=ordinals)):
            pb.TrajectoryGroup.FromString(chunk.data)
        self.phase("fetch")
        await self.buffer.Commit(pb.CommitRequest(run=RUN, fence=fence))
        self.phase("commit")


def processor_seconds(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


async def measure(redis_url: str, address: str, pids: dict[str, int]) -> None:
    buffer = stub(BufferStub, address, name="buffer")
    await buffer.Setup(setup(drop_zero_variance=True, max_age=1000))
    bench = Bench(buffer)
    await bench.step(0)
    bench.seconds.clear()
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    for step in range(1, STEPS + 1):
        await bench.step(step)
    counted = sum(seconds for name, seconds in bench.seconds.items() if "not counted" not in name)
    samples = STEPS * GROUPS * SAMPLES
    for name, pid in pids.items():
        used = processor_seconds(pid) - before[name]
        print(f"{name:24} {1e6 * used / samples:7.1f} us of processor time per sample")
    for name, seconds in bench.seconds.items():
        print(f"{name:24} {1e6 * seconds / samples:7.1f} us per sample")
    client = connect(redis_url)
    begin = time.perf_counter()
    verdict = await audit_store(client, RUN)
    audit = time.perf_counter() - begin
    print(f"{samples / counted:.0f} samples/s; audit of {verdict.events} events {audit:.2f} s")
    print(f"balanced: {verdict.balanced}; Redis {(await client.info('memory'))['used_memory_human']}")
    await client.aclose()
    await close_channels()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-buffer-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        process, address = start(server.url, Path(folder))
        try:
            assert server.process is not None
            pids = {"redis": server.process.pid, "buffer": process.pid, "client": os.getpid()}
            asyncio.run(measure(server.url, address, pids))
        finally:
            process.terminate()
            process.wait(20)
            server.kill()


if __name__ == "__main__":
    main()
