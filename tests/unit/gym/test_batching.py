"""Batches: bounded in size and in time, and every caller gets its own answer."""

from __future__ import annotations

import asyncio

import pytest

from gym_svc.batching import Batcher


async def test_callers_share_batches_and_get_their_own_results():
    batches = []

    async def flush(items):
        batches.append(list(items))
        return [item * 10 for item in items]

    batcher = Batcher(flush, size=4, delay=0.01)
    assert await asyncio.gather(*(batcher.submit(item) for item in range(6))) == [0, 10, 20, 30, 40, 50]
    assert batches == [[0, 1, 2, 3], [4, 5]]


async def test_a_batch_that_fails_fails_its_callers_and_no_later_ones():
    async def flush(items):
        if 1 in items:
            raise ValueError("odd")
        return items

    batcher = Batcher(flush, delay=0.001)
    results = await asyncio.gather(batcher.submit(0), batcher.submit(1), return_exceptions=True)
    assert [str(result) for result in results] == ["odd", "odd"]
    assert await batcher.submit(2) == 2


async def test_an_answer_of_the_wrong_length_is_an_error():
    async def flush(items):
        return []

    with pytest.raises(RuntimeError, match="1 items got 0 results"):
        await Batcher(flush, delay=0.001).submit(0)


async def test_a_caller_that_went_away_is_left_out():
    seen = []

    async def flush(items):
        seen.extend(items)
        return items

    batcher = Batcher(flush, delay=0.02)
    gone = asyncio.create_task(batcher.submit("gone"))
    stays = asyncio.create_task(batcher.submit("stays"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == "stays"
    assert seen == ["stays"]


async def test_closing_leaves_no_caller_waiting():
    async def flush(items):
        await asyncio.sleep(60)
        return items

    batcher = Batcher(flush, delay=0.001)
    waiting = asyncio.create_task(batcher.submit(0))
    await asyncio.sleep(0.01)
    await batcher.close(0.01)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 1)
