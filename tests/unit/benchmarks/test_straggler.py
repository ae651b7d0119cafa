"""The bench's straggler: one sample in each batch, and no validation sample, is slow."""

from __future__ import annotations

import time

import pytest

from benchmarks.async_parts.straggler import Straggler
from gym_svc.rows import Row
from gym_svc.sample import environment_seed
from protos.headrace.v1 import buffer_pb2, types_pb2

PROMPTS, SAMPLES, SECONDS = 4, 3, 0.05


async def seconds(book: str, group: int, sample: int) -> float:
    key = types_pb2.SampleKey(run="any", book=book, group=group, sample=sample)
    environment = Straggler(run_seed=7, every=PROMPTS, groups=64, seconds=SECONDS)
    await environment.reset(
        Row("rows:1", "{}", {}, ()), seed=environment_seed(buffer_pb2.Work(key=key, run_seed=7))
    )
    started = time.monotonic()
    assert (await environment.step(types_pb2.Message(role="assistant", content="4"))).done
    return time.monotonic() - started


@pytest.mark.asyncio
async def test_one_sample_of_each_batch_is_slow_and_none_of_validation() -> None:
    for step in range(3):
        batch = [
            (group, sample)
            for group in range(step * PROMPTS, (step + 1) * PROMPTS)
            for sample in range(SAMPLES)
        ]
        slow = [key for key in batch if await seconds("train", *key) >= SECONDS]
        assert slow == [(step * PROMPTS, 0)]
    assert await seconds("validation/0", 0, 0) < SECONDS
