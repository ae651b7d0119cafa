"""Edges of the loop ahead of training: leases given back, passes never lost, paused runs that go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protos.headrace.v1 import runs_pb2
from tests.unit.controller.test_ahead import ahead
from tests.unit.controller.test_loop import World, recipe, world

__all__ = ["ahead", "recipe", "world"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def opened(world: World, book: str) -> None:
    async with asyncio.timeout(10):
        while f"open {book}" not in [call for call, _ in world.stack.buffer.calls]:
            await asyncio.sleep(0.005)


async def test_engines_of_a_pass_that_was_made_again_are_given_back(
    world: World, ahead: dict[str, Any]
) -> None:
    ahead["grpo"]["val_period"] = 2
    world.stack.refit.spare = ["e1"]
    world.stack.buffer.slow = {"validation/2"}
    # Training stands in step 2: the second pass finds the same version.
    world.stack.trainer.delay_s = 0.6
    run = await world.submit(ahead)
    await opened(world, "validation/2")
    world.stack.refit.spare = ["e2"]
    await opened(world, "validation/2.2")
    world.stack.trainer.delay_s = 0.0
    message = await world.wait(run, timeout=15)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert set(world.stack.refit.leases) <= set(world.stack.refit.released)


async def test_a_pass_that_loses_its_engines_at_the_end_of_the_run_is_made_in_the_end(
    world: World, ahead: dict[str, Any]
) -> None:
    ahead["grpo"]["val_period"] = 4
    world.stack.refit.spare = ["e1"]
    world.stack.buffer.slow = {"validation/4"}
    run = await world.submit(ahead)
    await world.wait(run, steps=6)
    await asyncio.sleep(0.1)  # the loop waits for the pass now
    world.stack.refit.spare = []
    message = await world.wait(run, timeout=15)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert sorted(await world.scheduler.store.validations(run)) == [6]


async def test_a_paused_run_that_is_submitted_again_goes_on(world: World, ahead: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.05
    run = await world.submit(ahead)
    await world.wait(run, steps=1)
    await world.servicer.Pause(runs_pb2.PauseRunRequest(run=run), None)  # type: ignore[arg-type]
    again = await world.servicer.Submit(runs_pb2.SubmitRequest(run=run), None)  # type: ignore[arg-type]
    assert again.status == runs_pb2.RUN_STATUS_RUNNING
    message = await world.wait(run, timeout=5)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error


async def test_a_running_run_that_is_submitted_again_stays_running(
    world: World, ahead: dict[str, Any]
) -> None:
    world.stack.trainer.delay_s = 0.1
    run = await world.submit(ahead)
    await world.wait(run, steps=1)
    again = await world.servicer.Submit(runs_pb2.SubmitRequest(run=run), None)  # type: ignore[arg-type]
    assert again.status == runs_pb2.RUN_STATUS_RUNNING
