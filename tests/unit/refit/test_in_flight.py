"""Publishing under turns in flight, over real gRPC and real Redis: who is stopped, who is set free again."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.runtime.errors import Refused
from tests.unit.refit.conftest import World
from tests.unit.refit.test_publish import FULL

IN_FLIGHT = ["gate closed", "pause keep", *FULL[2:]]


async def test_nobody_is_waited_for_and_the_carried_turns_are_counted(world: World):
    await world.setup(in_flight=True)
    world.router.in_flight = 3
    answer = await world.publish(1)
    assert answer.turns_carried == 6
    for engine in ("e0", "e1"):
        assert world.of(engine) == IN_FLIGHT
        assert await world.state(engine) == "SERVING"


async def test_caches_are_cleared_when_the_recipe_says_so(world: World):
    await world.setup(in_flight=True, recompute_kv_cache=True)
    await world.publish(1)
    assert world.of("e0")[1] == "pause keep and clear"


async def test_a_failed_engine_gives_its_turns_up_and_stays_shut(world: World):
    await world.setup(in_flight=True)
    await world.publish(1)
    world.engines["e1"].fault = "image"
    answer = await world.publish(2)
    assert {e.engine for e in answer.engines if e.committed} == {"e0"}
    assert world.of("e1")[-2:] == ["finish", "pause abort"]
    assert await world.state("e1") == "QUARANTINED"
    assert world.router.closed == {"e1"}
    world.engines["e1"].fault = ""
    await world.publish(3)
    assert await world.state("e1") == "SERVING"
    assert world.router.closed == set()


async def test_a_version_that_is_not_committed_frees_the_turns_of_every_engine(world: World):
    await world.setup(in_flight=True, min_engines=2)
    await world.publish(1)
    world.engines["e1"].fault = "probe"
    with pytest.raises(Refused, match="differ by"):
        await world.publish(2)
    # e0 agreed and was resumed: what it samples now must never be answered either.
    for engine in ("e0", "e1"):
        assert world.of(engine)[-2:] == ["probe", "pause abort"]
        assert await world.state(engine) == "QUARANTINED"


async def test_an_engine_that_refuses_before_the_first_byte_goes_on_as_it_was(world: World):
    await world.setup(in_flight=True)
    await world.publish(1)
    world.engines["e1"].fault = "pause"
    await world.publish(2)
    assert world.of("e1")[-3:] == ["pause keep", "resume", "gate open"]
    assert world.engines["e1"].weights == 1


async def test_after_a_restore_turns_in_flight_are_given_up(world: World):
    await world.setup(in_flight=True)
    await world.publish(3)
    await world.publish(2, incarnation=1)
    assert world.of("e0")[-9] == "pause abort and clear"


async def test_an_engine_that_leaves_does_not_hold_up_the_others(world: World):
    await world.setup(in_flight=True)
    await world.publish(1)
    world.engines["e1"].fault = "hang"
    publish = asyncio.create_task(world.publish(2))
    while "begin 2" not in world.of("e1"):
        await asyncio.sleep(0.01)
    world.beats.pop("e1").cancel()
    left = time.monotonic()
    await world.leave("e1")
    answer = await publish
    assert time.monotonic() - left < 2
    assert {e.engine for e in answer.engines if e.committed} == {"e0"}
