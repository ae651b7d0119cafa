"""The books of a sealed run expire; other runs and the controller's records stay."""

from __future__ import annotations

from redis.asyncio import Redis

from services.buffer.retire import expire_books
from tests.unit.buffer.test_audit import a_run
from tests.unit.buffer.world import RUN, World


async def test_only_the_books_of_this_run_expire(world: World, redis: Redis) -> None:
    await a_run(world)
    await redis.hset(f"hr:{{{RUN}}}:run", "status", "4")
    await redis.set("hr:{other}:g:train:0", "x")
    await expire_books(redis, RUN, 600)
    ours = [key async for key in redis.scan_iter(match=f"hr:{{{RUN}}}:*")]
    lasting = {key async for key in redis.scan_iter() if await redis.ttl(key) == -1}
    assert len(ours) > 20
    assert lasting == {f"hr:{{{RUN}}}:run".encode(), b"hr:{other}:g:train:0"}
