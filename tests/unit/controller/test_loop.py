"""The step loop against fake peers and a real Redis: order, fences, restores, replacements, endings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from protos.headrace.v1 import runs_pb2
from services.controller.scheduler import Scheduler
from services.controller.servicer import RunsServicer
from services.controller.settings import ControllerSettings
from services.controller.store import TERMINAL
from services.runtime import redis, rpc
from services.runtime.errors import Corrupt, InvalidInput
from tests.unit.controller.fakes import FakeStack

# grpc.aio keeps one poller for a process: one event loop for all tests of this file.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class World:
    """A controller, its fake peers and a home."""

    stack: FakeStack
    settings: ControllerSettings
    client: Any
    scheduler: Scheduler
    servicer: RunsServicer
    task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.scheduler.forever())

    async def kill(self) -> None:
        """End the controller as a crash does: nothing is written after this."""
        assert self.task is not None
        self.task.cancel()
        done, _ = await asyncio.wait((self.task,), timeout=5)
        assert done, "a cancelled controller must end"

    async def submit(self, recipe: dict[str, Any]) -> str:
        request = runs_pb2.SubmitRequest(recipe_json=json.dumps(recipe))
        return (await self.servicer.Submit(request, None)).run  # type: ignore[arg-type]

    async def wait(self, run: str, *, steps: int | None = None, timeout: float = 30) -> runs_pb2.Run:
        async with asyncio.timeout(timeout):
            while True:
                message = await self.scheduler.store.get(run)
                if message.status in TERMINAL or (steps is not None and message.completed_steps >= steps):
                    return message
                await asyncio.sleep(0.02)


def controller(settings: ControllerSettings, client: Any, stack: FakeStack) -> World:
    scheduler = Scheduler(settings, client)
    return World(stack, settings, client, scheduler, RunsServicer(settings, scheduler, client))


@pytest_asyncio.fixture(loop_scope="module")
async def world(tmp_path: Path) -> AsyncIterator[World]:
    stack = FakeStack()
    await stack.start()
    peers = dict.fromkeys(("buffer", "reward", "rollout", "trainer", "refit"), stack.address)
    settings = ControllerSettings(home=tmp_path / "home", **peers)
    handle = await asyncio.to_thread(redis.acquire, settings.home)
    client = redis.connect(handle.url)
    made = controller(settings, client, stack)
    made.start()
    yield made
    await made.kill()
    await rpc.close_channels()
    await client.aclose()
    handle.close()
    await stack.stop()


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    row = {"responses_create_params": {"input": "1+1"}, "expected_answer": "2", "verifier": "exact_answer"}
    lines = "".join(json.dumps({**row, "id": i}) + "\n" for i in range(10))
    (tmp_path / "rows.jsonl").write_text(lines)
    path = {"data_path": str(tmp_path / "rows.jsonl")}
    grpo = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 6, "val_period": 3,
            "val_at_start": True, "val_at_end": True, "seed": 7}  # fmt: skip
    return {
        "name": "loop", "grpo": grpo, "policy": {"model_name": "m", "train_global_batch_size": 8},
        "data": {"train": path, "validation": path}, "checkpointing": {"enabled": True, "save_period": 2},
        "stack": {"service_start_timeout_s": 5, "engine_start_timeout_s": 5},
    }  # fmt: skip


async def test_steps_run_in_order_and_every_version_is_published(
    world: World, recipe: dict[str, Any]
) -> None:
    run = await world.submit(recipe)
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert world.stack.trainer.steps == [(t, tuple(range(4 * t, 4 * t + 4))) for t in range(6)]
    assert world.stack.refit.published == [(0, t) for t in range(7)]
    assert sorted(await world.scheduler.store.validations(run)) == [0, 3, 6]
    assert world.stack.buffer.durable_step == 5


async def test_rows_follow_a_permutation_of_each_epoch(world: World, recipe: dict[str, Any]) -> None:
    await world.wait(await world.submit(recipe))
    opened = world.stack.buffer.groups["train"]
    drawn = [json.loads(opened[g].row_json)["id"] for g in range(24)]
    assert sorted(drawn[:10]) == list(range(10)) == sorted(drawn[10:20])
    assert drawn[:10] != drawn[10:20]


async def test_a_lost_trainer_replays_the_same_groups_under_a_new_incarnation(
    world: World, recipe: dict[str, Any]
) -> None:
    world.stack.trainer.crash_before = {3}
    run = await world.submit(recipe)
    message = await world.wait(run)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert world.stack.buffer.restores == [2]
    replayed = [step for step, _ in world.stack.trainer.steps]
    assert replayed == [0, 1, 2, 2, 3, 4, 5]
    assert len({groups for step, groups in world.stack.trainer.steps if step == 2}) == 1
    assert world.stack.refit.published[-1] == (1, 6)
    assert (1, 2) in world.stack.refit.published
    assert sorted(world.stack.buffer.trained) == list(range(24))


async def test_a_new_controller_goes_on_with_a_higher_epoch(world: World, recipe: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.1
    run = await world.submit(recipe)
    await world.wait(run, steps=2)
    await world.kill()
    await world.scheduler.store._redis.delete(world.scheduler.store.key(run, "lease"))
    successor = controller(world.settings, world.client, world.stack)
    successor.start()
    message = await successor.wait(run)
    await successor.kill()
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert [step for step, _ in world.stack.trainer.steps] == list(range(6))
    assert len(set(world.stack.buffer.epochs)) == 2
    assert world.stack.buffer.restores == []


async def test_dropped_groups_are_replaced_by_new_draws_for_the_same_step(
    world: World, recipe: dict[str, Any]
) -> None:
    world.stack.buffer.drop = {5, 6}
    message = await world.wait(await world.submit(recipe))
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert dict(world.stack.trainer.steps)[1] == (4, 7, 8, 9)
    assert dict(world.stack.trainer.steps)[2] == (10, 11, 12, 13)


async def test_a_refused_version_fails_the_run_and_names_the_tensor(
    world: World, recipe: dict[str, Any]
) -> None:
    world.stack.refit.error = Corrupt("Tensor lm_head.weight differs", where="engine e")
    message = await world.wait(await world.submit(recipe))
    assert message.status == runs_pb2.RUN_STATUS_FAILED
    assert "lm_head.weight" in message.error


async def test_a_run_outlives_the_death_of_redis(world: World, recipe: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.1
    run = await world.submit(recipe)
    await world.wait(run, steps=1)
    keeper = psutil.Process(int((world.settings.home / "redis" / "keeper.pid").read_text()))
    (server,) = keeper.children()
    server.kill()
    async with asyncio.timeout(30):
        while True:
            try:
                message = await world.wait(run)
                break
            except redis.redis_py.ConnectionError:
                await asyncio.sleep(0.1)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error
    assert sorted(world.stack.buffer.trained) == list(range(24))


async def test_a_service_that_refuses_the_run_ends_it_at_once(world: World, recipe: dict[str, Any]) -> None:
    world.stack.rewards.error = InvalidInput("There is no verifier 'exakt'", where="env.verifiers")
    message = await world.wait(await world.submit(recipe), timeout=3)
    assert message.status == runs_pb2.RUN_STATUS_FAILED
    assert "exakt" in message.error


async def test_cancel_ends_a_run_and_the_next_one_starts(world: World, recipe: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.2
    first, second = await world.submit(recipe), await world.submit({**recipe, "name": "second"})
    await world.wait(first, steps=1)
    await world.scheduler.cancel(first, "enough")
    assert (await world.wait(first)).status == runs_pb2.RUN_STATUS_CANCELLED
    world.stack.trainer.delay_s = 0.0
    world.stack.trainer.saved = 0
    message = await world.wait(second)
    assert message.status == runs_pb2.RUN_STATUS_COMPLETED, message.error


async def test_other_data_under_a_run_is_refused(world: World, recipe: dict[str, Any]) -> None:
    world.stack.trainer.delay_s = 0.1
    run = await world.submit(recipe)
    await world.wait(run, steps=1)
    await world.kill()
    await world.scheduler.store._redis.delete(world.scheduler.store.key(run, "lease"))
    path = Path(recipe["data"]["train"]["data_path"])
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    successor = controller(world.settings, world.client, world.stack)
    successor.start()
    message = await successor.wait(run)
    await successor.kill()
    assert message.status == runs_pb2.RUN_STATUS_FAILED
    assert "training data changed" in message.error


async def test_watch_sends_every_event_in_order_and_ends_with_the_run(
    world: World, recipe: dict[str, Any]
) -> None:
    run = await world.submit(recipe)
    events = [e async for e in world.servicer.Watch(runs_pb2.WatchRunRequest(run=run), None)]  # type: ignore[arg-type]
    assert [e.sequence for e in events] == list(range(1, len(events) + 1))
    assert [e.step for e in events if e.kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert events[-1].text == "completed"
