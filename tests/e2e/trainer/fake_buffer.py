"""A buffer that only answers Fetch, and trajectories as the real one would send them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc.aio
import numpy as np

from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc, types_pb2

VOCABULARY = 64


def column(name: str, dtype: int, array: np.ndarray) -> types_pb2.Column:
    return types_pb2.Column(name=name, dtype=dtype, shape=array.shape, data=array.tobytes())


def trajectory(run: str, group: int, sample: int, *, seed: int = 0) -> types_pb2.Trajectory:
    """12 to 20 tokens, the first 6 a prompt; rewards differ inside a group."""
    random = np.random.default_rng([seed, group, sample])
    tokens = int(random.integers(12, 21))
    sampled = np.arange(tokens) >= 6
    return types_pb2.Trajectory(
        key=types_pb2.SampleKey(run=run, book="train", group=group, sample=sample),
        attempt=1,
        outcome=types_pb2.OUTCOME_COMPLETED,
        reward=types_pb2.Reward(value=float((group + sample) % 2)),
        columns=[
            column("ids", types_pb2.DTYPE_INT32, random.integers(1, VOCABULARY, tokens).astype("<i4")),
            column("logprobs", types_pb2.DTYPE_FLOAT32, np.where(sampled, -4.0, 0.0).astype("<f4")),
            column("versions", types_pb2.DTYPE_INT32, np.where(sampled, 0, -1).astype("<i4")),
            column("mask", types_pb2.DTYPE_UINT8, sampled.astype("u1")),
        ],
        trace=types_pb2.TraceContext(traceparent=f"00-{group * 100 + sample + 1:032x}-{1:016x}-01"),
    )


def step_groups(run: str, step: int, groups: int = 4, samples: int = 4) -> list[buffer_pb2.TrajectoryGroup]:
    return [
        buffer_pb2.TrajectoryGroup(
            group=ordinal, trajectories=[trajectory(run, ordinal, sample) for sample in range(samples)]
        )
        for ordinal in range(step * groups, (step + 1) * groups)
    ]


def manifest(run: str, step: int, groups: list[buffer_pb2.TrajectoryGroup]) -> buffer_pb2.Manifest:
    return buffer_pb2.Manifest(
        run=run,
        book="train",
        step=step,
        groups=[
            buffer_pb2.ManifestGroup(
                group=group.group,
                samples=[
                    buffer_pb2.ManifestSample(
                        sample=each.key.sample,
                        attempt=each.attempt,
                        tokens=each.columns[0].shape[0],
                        sampled_tokens=each.columns[0].shape[0] - 6,
                        outcome=each.outcome,
                        reward=each.reward.value,
                        trace=each.trace,
                        version=0,
                    )
                    for each in group.trajectories
                ],
            )
            for group in groups
        ],
    )


class FakeBuffer(buffer_pb2_grpc.BufferServicer):
    """Serves the groups of steps on a thread of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.delay = 0.0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        server = grpc.aio.server()
        buffer_pb2_grpc.add_BufferServicer_to_server(self, server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        await server.start()
        self._ready.set()
        await self._end.wait()
        await server.stop(0)

    async def Fetch(self, request: buffer_pb2.FetchRequest, _: Any) -> AsyncIterator[types_pb2.Chunk]:
        await asyncio.sleep(self.delay)
        for ordinal in request.groups:
            (group,) = step_groups(request.run, ordinal // 4)[ordinal % 4 : ordinal % 4 + 1]
            data = group.SerializeToString()
            middle = len(data) // 2
            yield types_pb2.Chunk(data=data[:middle])
            yield types_pb2.Chunk(data=data[middle:], last=True)
