"""The admission rules, and the loop that applies them on several replicas."""

from __future__ import annotations

import asyncio

import pytest

from services.buffer.admission import Candidate, Rules, judge
from services.buffer.admit import Admission
from tests.unit.buffer.world import RUN, World, spec, trajectory


@pytest.mark.parametrize(
    ("rewards", "versions", "rules", "reason"),
    [
        ([0.0, 1.0], [5, 5], Rules(), ""),
        ([1.0, 1.0], [5, 5], Rules(), ""),
        ([1.0, 1.0], [5, 5], Rules(drop_zero_variance=True), "zero_variance"),
        ([0.0, 1.0], [5, 5], Rules(drop_zero_variance=True), ""),
        ([None, None], [None, None], Rules(drop_zero_variance=True, max_age=0), ""),
        ([0.0, 1.0], [5, 4], Rules(max_age=0), "age"),
        ([0.0, 1.0], [5, 4], Rules(max_age=1), ""),
        ([0.0], [5], Rules(), "too_few_siblings"),
        ([0.0], [5], Rules(minimum_siblings=1), ""),
        ([0.0, 1.0], [5, 5], Rules(minimum_siblings=9), ""),
    ],
)
def test_rules(rewards: list[float | None], versions: list[int | None], rules: Rules, reason: str) -> None:
    assert judge(Candidate(2, 5, rewards, versions), rules) == reason


def test_one_sample_has_no_variance_to_lose() -> None:
    assert judge(Candidate(1, 0, [1.0], [0]), Rules(drop_zero_variance=True)) == ""


async def test_equal_rewards_are_dropped_and_counted(world: World) -> None:
    await world.setup(drop_zero_variance=True)
    await world.open(spec(0), spec(1))
    work = await world.claim()
    await world.append(*[trajectory(w, reward=w.key.sample * w.key.group) for w in work])
    assert await world.admit() == 2
    progress = await world.steps.progress(RUN, "train")
    assert dict(progress.groups.dropped) == {"zero_variance": 1}
    assert dict(progress.samples.dropped) == {"zero_variance": 4}
    waiting = await world.lease(groups=2)
    assert (waiting.ready, waiting.missing, waiting.open) == (1, 1, 0)


async def test_validation_books_have_no_rules(world: World) -> None:
    await world.setup(drop_zero_variance=True, max_age=0)
    await world.open(spec(0, step=9), book="validation/9")
    await world.append(*[trajectory(w, reward=1.0) for w in await world.claim()])
    await world.admit()
    assert dict((await world.steps.progress(RUN, "validation/9")).groups_by_state) == {"ready": 1}


async def test_replicas_share_the_stream_and_each_group_is_judged_once(world: World) -> None:
    await world.setup()
    await world.open(*[spec(g, samples=1) for g in range(150)])
    await world.append(*[trajectory(w) for w in await world.claim(200)])
    replicas = [Admission(world.do, RUN, f"replica-{i}") for i in range(3)]
    decided = await asyncio.gather(*[replica.take_new(None) for replica in replicas])
    assert sum(decided) == 150
    assert max(decided) < 150
    assert (await world.steps.progress(RUN, "train")).groups_by_state["ready"] == 150


async def test_what_a_dead_replica_has_read_is_taken_over(world: World) -> None:
    await world.setup()
    await world.open(spec(0))
    await world.append(*[trajectory(w) for w in await world.claim()])
    # The replica reads and dies before it decides.
    await world.do.redis.xreadgroup("admission", "dead", {f"hr:{{{RUN}}}:complete": ">"}, count=9)
    survivor = Admission(world.do, RUN, "alive")
    assert await survivor.take_new(None) == 0
    assert await survivor.take_over(idle_ms=60_000) == 0
    assert await survivor.take_over(idle_ms=0) == 1
    assert (await world.lease(groups=1)).HasField("manifest")
