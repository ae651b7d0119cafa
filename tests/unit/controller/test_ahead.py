"""The step loop ahead of training: what is open when, pauses, and validation beside training."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protos.headrace.v1 import buffer_pb2, runs_pb2
from services.controller.timing import PhaseClock, overhead, total
from tests.unit.controller.test_loop import World, recipe, world

__all__ = ["recipe", "world"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def ahead(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["grpo"] |= {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2}, "val_at_start": False,
                       "val_at_end": False, "val_period": 0}  # fmt: skip
    recipe["loss_fn"] = {"use_importance_sampling_correction": True}
    return recipe


async def test_work_for_w_steps_is_open_before_a_step_is_leased(world: World, ahead: dict[str, Any]) -> None:
    run = await world.submit(ahead)
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    calls = world.stack.buffer.calls
    opened = [step for call, step in calls if call == "open train"]
    assert opened == list(range(6)), "every step once, in order"
    for step in range(6):
        before = calls[: calls.index(("lease", step))]
        assert [s for call, s in before if call == "open train"] == list(range(min(step + 2, 5) + 1))


async def test_groups_open_again_after_a_restore_for_the_whole_window(
    world: World, ahead: dict[str, Any]
) -> None:
    world.stack.trainer.crash_before = {3}
    run = await world.submit(ahead)
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert [step for step, _ in world.stack.trainer.steps] == [0, 1, 2, 2, 3, 4, 5]
    assert len(world.stack.buffer.groups["train"]) == 24, "no group was drawn twice"


async def test_a_paused_run_starts_no_step_and_goes_on(world: World, ahead: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.05
    run = await world.submit(ahead)
    await world.wait(run, steps=1)
    paused = await world.servicer.Pause(runs_pb2.PauseRunRequest(run=run), None)  # type: ignore[arg-type]
    assert paused.status == runs_pb2.RUN_STATUS_PAUSED
    await asyncio.sleep(0.3)
    steps, calls = len(world.stack.trainer.steps), len(world.stack.buffer.calls)
    await asyncio.sleep(0.4)
    assert len(world.stack.trainer.steps) == steps < 6
    assert [call for call, _ in world.stack.buffer.calls[calls:] if call == "open train"] == []
    await world.servicer.Resume(runs_pb2.ResumeRunRequest(run=run), None)  # type: ignore[arg-type]
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    seconds = [r["seconds"]["total"] for r in (await world.scheduler.store.steps(run)).values()]
    assert max(seconds) < 0.5, "time spent paused is no run time"


async def test_a_pause_outlives_the_controller_and_a_paused_run_can_be_cancelled(
    world: World, ahead: dict[str, Any]
) -> None:
    from tests.unit.controller.test_loop import controller

    world.stack.trainer.delay_s = 0.05
    run = await world.submit(ahead)
    await world.wait(run, steps=1)
    await world.servicer.Pause(runs_pb2.PauseRunRequest(run=run), None)  # type: ignore[arg-type]
    await world.kill()
    await world.scheduler.store._redis.delete(world.scheduler.store.key(run, "lease"))
    successor = controller(world.settings, world.client, world.stack)
    successor.start()
    await asyncio.sleep(0.5)
    steps = len(world.stack.trainer.steps)
    await asyncio.sleep(0.4)
    assert len(world.stack.trainer.steps) == steps
    assert (await successor.scheduler.store.get(run)).status == runs_pb2.RUN_STATUS_PAUSED
    await successor.scheduler.cancel(run, "enough")
    assert (await successor.wait(run)).status == runs_pb2.RUN_STATUS_CANCELLED
    await successor.kill()


async def test_the_order_reaches_the_buffer_and_the_window_its_age(
    world: World, ahead: dict[str, Any]
) -> None:
    ahead["stack"]["order"] = "ready_first"
    run = await world.submit(ahead)
    await world.wait(run)
    seen = world.stack.buffer.seen
    assert (seen["order"], seen["max_age"]) == (buffer_pb2.LEASE_ORDER_READY_FIRST, 2)
    assert seen["assigned"] == seen["released"] == run


async def test_validation_runs_beside_training_on_leased_engines(world: World, ahead: dict[str, Any]) -> None:
    ahead["grpo"]["val_period"] = 2
    world.stack.refit.spare = ["e1"]
    world.stack.buffer.slow = {"validation/2"}
    run = await world.submit(ahead)
    await world.wait(run, steps=4, timeout=10)
    assert 2 not in await world.scheduler.store.validations(run), "training did not wait"
    world.stack.buffer.slow.clear()
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    found = await world.scheduler.store.validations(run)
    assert found[2]["beside_training"]
    assert {"validation/2", "validation/4"} <= set(world.stack.refit.released)


async def test_a_pass_whose_engines_change_is_dropped_and_made_again(
    world: World, ahead: dict[str, Any]
) -> None:
    ahead["grpo"]["val_period"] = 2
    world.stack.refit.spare = ["e1"]
    world.stack.buffer.slow = {"validation/2"}
    run = await world.submit(ahead)
    async with asyncio.timeout(10):
        while "open validation/2" not in [call for call, _ in world.stack.buffer.calls]:
            await asyncio.sleep(0.01)
    world.stack.refit.spare = ["e2"]
    message = await world.wait(run, timeout=15)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    found = await world.scheduler.store.validations(run)
    books = [book for book in world.stack.buffer.groups if book.startswith("validation/")]
    assert found, "a pass was made in the end"
    assert len(books) > len(found), "the voided one has a book of its own"


async def test_time_of_a_pause_is_nobodys_and_phases_add_up() -> None:
    clock = PhaseClock()
    with clock.phase("generation"):
        clock.skip(0.5)
    clock.split_generation(0.0, 0.0)
    seconds = clock.record()
    assert seconds["total"] < 0
    records = [{"generation": 6.0, "environment": 1.0, "training": 2.0, "checkpoint": 0.5, "total": 10.0}]
    timing = total(records)
    assert timing["idle"] == pytest.approx(0.5)
    assert overhead(timing) == {"seconds": pytest.approx(1.0), "share": pytest.approx(0.1)}
