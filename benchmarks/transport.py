"""Trajectories per second through the buffer against raw Redis streams, with the same bytes in the same run.

Headrace: 16 trajectories of 8,192 tokens in each ``Append``, a few appends in flight as gym workers have
them; admission; ``Lease``, ``Fetch`` and ``Commit`` of one step while the next one is being appended. The
buffer is a process of its own, over gRPC. The baseline: redis-py against the same Redis (embedded, AOF
everysec), pipelines of 16 XADD, then XREADGROUP and XACK of 16. Passes alternate; medians count. Every byte
fetched is compared with what was appended. A pass is long enough (218 MB) for both to meet the file's
fsync; with ``--steps 4`` the baseline's bytes stay in the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Claim, say
from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from protos.headrace.v1.buffer_pb2_grpc import BufferStub
from services.runtime import redis, rpc, spawn
from services.runtime.errors import Corrupt, NotReady

SUMMARY = "trajectories/s through append, lease, fetch and commit against raw redis-py streams"
BAR = 0.30
RUN = "bench-transport"
PROMPT = 512
SAMPLES = 8
BATCH = 16
START_SECONDS = 30.0
Trajectories = list[types.Trajectory]


def run(args: Sequence[str]) -> list[Claim]:
    """Measure; one claim. Raises Corrupt when a byte was lost."""
    options = _parse(args)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        home = Path(name)
        with redis.acquire(home) as handle, _buffer(home) as address:
            raw, ours = asyncio.run(_alternate(options, handle.url, address))
    value, baseline = statistics.median(ours), statistics.median(raw)
    megabytes = _bytes_of(options.tokens) / 1e6
    settings = {"tokens": options.tokens, "bytes": _bytes_of(options.tokens),
                "groups_per_step": options.groups, "samples_per_group": SAMPLES, "steps": options.steps,
                "rounds": options.rounds, "in_flight": options.in_flight, "append_batch": BATCH}  # fmt: skip
    extra = {"megabytes_per_s": value * megabytes, "baseline_megabytes_per_s": baseline * megabytes,
             "lost": 0, "passes": ours, "baseline_passes": raw}  # fmt: skip
    name = "raw redis-py: pipelined XADD of 16, then XREADGROUP + XACK of 16"
    return [Claim("transport", value, baseline, "trajectories/s", name, settings, BAR, extra)]


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench transport", description=SUMMARY)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 in one step")
    parser.add_argument(
        "--steps",
        type=int,
        default=16,
        help="of a pass; short passes fit the page cache, and no fsync is seen",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=4, help="appends on their way at a time")
    return parser.parse_args(args)


def _bytes_of(tokens: int) -> int:
    return 13 * tokens


@contextmanager
def _buffer(home: Path) -> Iterator[str]:
    """A buffer process on a free port; its address."""
    ready = home / "buffer.json"
    environment = {**os.environ, "HEADRACE_BUFFER_LISTEN": "127.0.0.1:0", "HEADRACE_BUFFER_HOME": str(home),
                   "HEADRACE_BUFFER_READY_FILE": str(ready), "HEADRACE_HOME": str(home)}  # fmt: skip
    with (home / "buffer.log").open("wb") as log:
        process = subprocess.Popen(
            spawn.wrap([sys.executable, "-m", "services.cli.main", "serve", "buffer"]),
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        end = time.monotonic() + START_SECONDS
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > end:
                raise NotReady("The buffer did not start", where=str(home / "buffer.log"))
            time.sleep(0.05)
        yield str(json.loads(ready.read_text())["address"])
    finally:
        process.terminate()
        process.wait(30)


async def _alternate(options: argparse.Namespace, url: str, address: str) -> tuple[list[float], list[float]]:
    raw, ours = [], []
    subject = _Headrace(address, options)
    baseline = _Raw(url)
    samples = options.groups * SAMPLES * options.steps
    columns = [_columns(options.tokens, seed) for seed in range(BATCH)]
    await subject.setup()
    for number in range(options.rounds + 1):
        seconds_raw = await asyncio.to_thread(
            baseline.one_pass, [b"".join(c.values()) for c in columns], samples
        )
        seconds = await subject.one_pass(number, columns)
        if number:  # the first round warms both up
            raw.append(samples / seconds_raw)
            ours.append(samples / seconds)
            say(f"round {number}: {ours[-1]:.0f} trajectories/s, raw {raw[-1]:.0f}: {ours[-1] / raw[-1]:.2f}")
    await rpc.close_channels()
    return raw, ours


def _columns(tokens: int, seed: int) -> dict[str, bytes]:
    """The required columns of one trajectory, as bytes."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 150_000, tokens, dtype=np.int32)
    ids[:PROMPT] = np.arange(PROMPT)
    sampled = np.arange(tokens) >= PROMPT
    logprobs = np.where(sampled, -rng.random(tokens, dtype=np.float32), 0).astype(np.float32)
    versions = np.where(sampled, 0, -1).astype(np.int32)
    found: dict[str, NDArray[Any]]
    found = {"ids": ids, "logprobs": logprobs, "versions": versions, "mask": sampled.astype(np.uint8)}
    return {name: column.tobytes() for name, column in found.items()}


class _Raw:
    """redis-py alone."""

    def __init__(self, url: str) -> None:
        self._redis = redis.connect_sync(url)

    def one_pass(self, payloads: Sequence[bytes], samples: int) -> float:
        """Seconds for ``samples`` of ``payloads``, there and back."""
        self._redis.delete("raw")
        self._redis.xgroup_create("raw", "readers", "0", mkstream=True)
        began = time.perf_counter()
        for _ in range(samples // BATCH):
            pipe = self._redis.pipeline(transaction=False)
            for payload in payloads[:BATCH]:
                pipe.xadd("raw", {"t": payload})
            pipe.execute()
            reply: Any = self._redis.xreadgroup("readers", "one", {"raw": ">"}, count=BATCH)
            self._redis.xack("raw", "readers", *(entry for entry, _ in reply[0][1]))
        seconds = time.perf_counter() - began
        self._redis.delete("raw")
        return seconds


class _Headrace:
    """The buffer as controller, gym workers and trainer use it."""

    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self._address = address
        self._options = options
        self._slots = asyncio.Semaphore(options.in_flight)

    async def setup(self) -> None:
        """Make the run known."""
        self._stub: Any = rpc.stub(BufferStub, self._address, name="buffer")
        request = pb.BufferSetupRequest(
            run=RUN, infrastructure_attempts=2, data_attempts=2, claim_timeout_s=300, max_age=1 << 20
        )
        await self._stub.Setup(request)

    async def one_pass(self, number: int, columns: Sequence[dict[str, bytes]]) -> float:
        """Seconds of ``steps`` steps, from the first append to the last commit."""
        options = self._options
        first = number * options.steps
        steps = range(first, first + options.steps)
        batches = [await self._open(step, columns) for step in steps]
        began = time.perf_counter()
        fetches = []
        for step, trajectories in zip(steps, batches, strict=True):
            await self._append(trajectories)
            fetches.append(asyncio.create_task(self._train(step)))
        fetched = [data for each in await asyncio.gather(*fetches) for data in each]
        seconds = time.perf_counter() - began
        self._compare(fetched, columns)
        await self._stub.MarkDurable(
            pb.MarkDurableRequest(run=RUN, fence=types.Fence(epoch=1, step=steps[-1]))
        )
        return seconds

    async def _open(self, step: int, columns: Sequence[dict[str, bytes]]) -> Trajectories:
        """Dispatch and claim a step (not counted); the trajectories that its samples get."""
        options = self._options
        sampling = types.SamplingParams(temperature=1, top_p=1, top_k=-1, min_p=0, max_new_tokens=1)
        specs = [
            pb.GroupSpec(group=step * options.groups + g, samples=SAMPLES, target_step=step, row_json="{}",
                         sampling=sampling)
            for g in range(options.groups)
        ]  # fmt: skip
        fence = types.Fence(epoch=1, step=step)
        await self._stub.OpenGroups(pb.OpenGroupsRequest(run=RUN, book="train", fence=fence, groups=specs))
        claimed: list[pb.Work] = []
        while len(claimed) < options.groups * SAMPLES:
            answer = await self._stub.Claim(pb.ClaimRequest(run=RUN, worker="w", max_samples=1024))
            claimed += answer.work
        return [self._trajectory(work, columns[at % BATCH]) for at, work in enumerate(claimed)]

    def _trajectory(self, work: pb.Work, columns: dict[str, bytes]) -> types.Trajectory:
        tokens = self._options.tokens
        kinds = {"ids": types.DTYPE_INT32, "logprobs": types.DTYPE_FLOAT32, "versions": types.DTYPE_INT32,
                 "mask": types.DTYPE_UINT8}  # fmt: skip
        segments = [
            types.Segment(source=types.SEGMENT_SOURCE_PROMPT, start=0, length=PROMPT),
            types.Segment(source=types.SEGMENT_SOURCE_SAMPLED, start=PROMPT, length=tokens - PROMPT),
        ]
        return types.Trajectory(
            key=work.key, attempt=work.attempt, outcome=types.OUTCOME_COMPLETED, segments=segments,
            reward=types.Reward(value=float(work.key.sample)), policy_versions=[types.PolicyVersion()],
            finish_reason=types.FINISH_REASON_STOP, turns=1,
            columns=[
                types.Column(name=name, dtype=kinds[name], shape=[tokens], data=data)
                for name, data in columns.items()
            ],
        )  # fmt: skip

    async def _append(self, trajectories: Trajectories) -> None:
        async def one(batch: Trajectories) -> None:
            async with self._slots:
                answer = await self._stub.Append(pb.AppendRequest(worker="w", trajectories=batch))
            if any(result.status != pb.APPEND_STATUS_ACCEPTED for result in answer.results):
                raise Corrupt(f"An append was not accepted: {answer.results[0]}")

        parts = [trajectories[at : at + BATCH] for at in range(0, len(trajectories), BATCH)]
        await asyncio.gather(*(one(part) for part in parts))

    async def _train(self, step: int) -> list[bytes]:
        """Lease, fetch, commit; the columns of each trajectory, joined."""
        fence = types.Fence(epoch=1, step=step)
        lease = pb.LeaseRequest(run=RUN, fence=fence, groups=self._options.groups, version=step, wait_s=30)
        manifest = (await self._stub.Lease(lease)).manifest
        ordinals = [group.group for group in manifest.groups]
        found: list[bytes] = []
        parts: list[bytes] = []
        async for chunk in self._stub.Fetch(pb.FetchRequest(run=RUN, book="train", groups=ordinals)):
            parts.append(chunk.data)
            if chunk.last:
                group = pb.TrajectoryGroup.FromString(b"".join(parts))
                found += [b"".join(c.data for c in t.columns) for t in group.trajectories]
                parts = []
        await self._stub.Commit(pb.CommitRequest(run=RUN, fence=fence))
        return found

    def _compare(self, fetched: Sequence[bytes], columns: Sequence[dict[str, bytes]]) -> None:
        wanted = {hashlib.sha256(b"".join(c.values())).digest() for c in columns}
        options = self._options
        expected = options.groups * SAMPLES * options.steps
        if len(fetched) != expected:
            raise Corrupt(f"{len(fetched)} of {expected} trajectories came back")
        if {hashlib.sha256(data).digest() for data in fetched} - wanted:
            raise Corrupt("A trajectory came back with other bytes than it was appended with")
