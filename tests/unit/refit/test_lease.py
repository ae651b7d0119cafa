"""Engines set aside for a book: passed by, kept at their version, given back, and never kept for ever."""

from __future__ import annotations

import pytest

from protos.headrace.v1 import refit_pb2, types_pb2
from services.runtime.errors import InvalidInput
from tests.unit.refit.conftest import World

BOOK = "validation/1"


async def lease(world: World, engines: int = 1, *, epoch: int = 1, book: str = BOOK) -> list[str]:
    answer = await world.stub.LeaseEngines(
        refit_pb2.LeaseEnginesRequest(
            run=world.run, fence=types_pb2.Fence(epoch=epoch), book=book, engines=engines
        ),
        timeout=5,
    )
    return list(answer.engines)


async def release(world: World, book: str = BOOK) -> None:
    await world.stub.ReleaseEngines(refit_pb2.ReleaseEnginesRequest(run=world.run, book=book), timeout=5)


async def test_publishes_pass_a_leased_engine_by_and_it_catches_up_after_its_release(world: World):
    await world.setup()
    await world.publish(1)
    assert await lease(world) == ["e1"]
    before = world.of("e1")
    answer = await world.publish(2)
    assert [e.engine for e in answer.engines] == ["e0"]
    await world.beat(world.engines["e1"])
    entry = (await world.roster())["e1"]
    assert (entry.state, entry.book, entry.committed.number) == (refit_pb2.ENGINE_STATE_SERVING, BOOK, 1)
    assert world.of("e1") == before
    # Repeating the committed version touches nobody, and the lease counts for nothing in it.
    assert [e.engine for e in (await world.publish(2)).engines] == ["e0"]
    await release(world)
    await world.until_state("e1", "SERVING")
    assert world.engines["e1"].weights == 2
    assert (await world.roster())["e1"].book == ""
    assert world.trainer.stagings == 2


async def test_training_keeps_what_it_needs_and_a_repeat_gets_the_same(world: World):
    await world.setup()
    await world.publish(0)
    assert await lease(world, 5) == ["e1"]
    assert await lease(world, 5) == ["e1"]
    assert await lease(world, book="validation/2") == []
    await release(world)
    await world.setup(min_engines=2)
    assert await lease(world) == []
    with pytest.raises(InvalidInput):
        await lease(world, book="train")


async def test_a_lease_ends_with_a_newer_owner_of_the_run_and_with_the_run(world: World):
    await world.setup()
    await world.publish(0)
    assert await lease(world) == ["e1"]
    await world.setup(epoch=2)
    assert (await world.roster())["e1"].book == ""
    assert await lease(world, epoch=2) == ["e1"]
    world.run = f"{world.run}-next"
    await world.setup()
    assert (await world.roster())["e1"].book == ""


async def test_a_released_engine_with_the_version_in_force_serves_at_once(world: World):
    await world.setup()
    await world.publish(1)
    await lease(world)
    before = world.of("e1")
    await release(world)
    assert await world.state("e1") == "SERVING"
    assert world.of("e1") == before
