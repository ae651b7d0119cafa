"""Random life: workers crash, calls are repeated, trainers restored, Redis killed; the books balance."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import runs_pb2 as runs
from protos.headrace.v1 import types_pb2 as types
from services.buffer.audit import audit_store
from services.buffer.reclaim import reclaim_all
from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions
from services.runtime.errors import Fenced, Refused
from services.runtime.redis import connect
from tests.unit.buffer.conftest import RedisServer
from tests.unit.buffer.world import RUN, World, spec, trajectory

FAILURES = (
    types.OUTCOME_INFRASTRUCTURE_ERROR, types.OUTCOME_ENVIRONMENT_ERROR, types.OUTCOME_VERIFIER_ERROR,
)  # fmt: skip
GROUPS = 3


class Walk:
    """A controller, workers that may die, and a trainer that may be restored, all drawn from one seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.held: list[pb.Work] = []
        self.dead: list[pb.Work] = []
        self.next_group = 0
        self.step = 0
        self.epoch = 1
        self.durable = 0
        self.manifests: dict[int, pb.Manifest] = {}
        self.commits = 0
        self.taken: Counter[str] = Counter()

    async def act(self) -> None:
        actions = {
            self.dispatch: 6, self.claim: 8, self.append: 14, self.admit: 8, self.train: 8, self.save: 2,
            self.fail: 2, self.crash: 2, self.expire: 4, self.late: 2, self.restore: 2, self.new_life: 1,
        }  # fmt: skip
        (action,) = self.random.choices(list(actions), list(actions.values()))
        self.taken[action.__name__] += 1
        await action()

    async def dispatch(self) -> None:
        waiting = await self.world.lease(self.step, groups=GROUPS, epoch=self.epoch)
        specs = [spec(self.next_group + i, samples=3, step=self.step) for i in range(waiting.missing)]
        self.next_group += len(specs)
        for _ in range(2):
            await self.world.open(*specs, epoch=self.epoch)

    async def claim(self) -> None:
        self.held += await self.world.claim(self.random.randint(1, 6))

    async def append(self) -> None:
        self.random.shuffle(self.held)
        work, self.held = self.held[:5], self.held[5:]
        for _ in range(self.random.randint(1, 2)):
            sent = [trajectory(w, reward=self.random.randint(0, 1)) for w in work]
            await self.world.append(*sent)

    async def fail(self) -> None:
        if self.held:
            work, outcome = self.held.pop(), self.random.choice(FAILURES)
            first = await self.world.fail(work, outcome=outcome)
            assert await self.world.fail(work, outcome=outcome) == first

    async def crash(self) -> None:
        half = len(self.held) // 2
        self.dead += self.held[:half]
        self.held = self.held[half:]

    async def expire(self) -> None:
        await asyncio.sleep(0.03)
        refs = [pb.ClaimRef(key=w.key, attempt=w.attempt) for w in self.held]
        lost = await self.world.store.heartbeat(RUN, "w1", refs)
        self.held = [w for w, ref in zip(self.held, refs, strict=True) if ref not in lost]
        await reclaim_all(self.world.store, RUN)

    async def late(self) -> None:
        if self.dead:
            await self.world.append(trajectory(self.random.choice(self.dead)))

    async def admit(self) -> None:
        await self.world.admit(f"replica-{self.random.randint(0, 1)}")

    async def train(self) -> None:
        leased = await self.world.lease(self.step, groups=GROUPS, epoch=self.epoch)
        if not leased.HasField("manifest"):
            return
        known = self.manifests.setdefault(self.step, leased.manifest)
        assert leased.manifest == known, "a step is trained again on the same groups"
        if self.random.random() < 0.2:
            return  # the controller dies between lease and commit
        first = await self.world.commit(self.step, self.epoch)
        assert await self.world.commit(self.step, self.epoch) == first
        self.step += 1
        self.commits += 1

    async def save(self) -> None:
        if self.step > self.durable:
            self.durable = self.random.randint(self.durable + 1, self.step)
            fence = types.Fence(epoch=self.epoch, step=self.durable - 1)
            for _ in range(2):
                await self.world.steps.mark_durable(RUN, fence)

    async def restore(self) -> None:
        self.epoch += 1
        self.step = self.random.randint(self.durable, self.step)
        fence = types.Fence(epoch=self.epoch, step=self.step)
        first = await self.world.steps.restore(RUN, fence, self.step)
        assert await self.world.steps.restore(RUN, fence, self.step) == first
        if self.durable:
            with pytest.raises(Refused):
                await self.world.steps.restore(RUN, fence, self.durable - 1)

    async def new_life(self) -> None:
        self.epoch += 1
        await self.world.lease(self.step, groups=GROUPS, epoch=self.epoch)
        with pytest.raises(Fenced):
            await self.world.lease(self.step, groups=GROUPS, epoch=self.epoch - 1)

    async def check(self) -> runs.AuditResponse:
        verdict = await audit_store(self.world.do.redis, RUN)
        assert verdict.balanced, [fault.text for fault in verdict.imbalances]
        progress = await self.world.steps.progress(RUN, "train")
        for book in verdict.books:
            assert book.groups == progress.groups, "the cached counters follow the records"
            assert book.samples == progress.samples
        return verdict


@pytest.mark.parametrize("seed", range(6))
async def test_the_books_balance_at_every_point(world: World, seed: int) -> None:
    await world.setup(
        claim_timeout_s=0.025, infrastructure_attempts=3, data_attempts=2, drop_zero_variance=seed % 2 == 0,
        minimum_siblings=seed % 3,
    )  # fmt: skip
    walk = Walk(world, seed)
    for _ in range(250):
        await walk.act()
        await walk.check()
    await world.steps.drop_open(RUN, "train", "end")
    verdict = await walk.check()
    (book,) = verdict.books
    assert book.groups.trained >= walk.durable * GROUPS
    assert book.groups.open == 0
    assert walk.commits > 2, f"the walk got somewhere: {walk.taken}"
    leftovers = await world.do.redis.xlen(f"hr:{{{RUN}}}:work") + await world.do.redis.xlen(
        f"hr:{{{RUN}}}:redo"
    )
    assert leftovers == 0, "no queue entry outlives its group"


async def test_the_books_survive_a_killed_redis(redis_server: RedisServer, world: World) -> None:
    await world.setup(claim_timeout_s=0.3)
    await world.open(*[spec(g, step=0) for g in range(3)], *[spec(g, step=1) for g in range(3, 6)])
    first = await world.claim(14, "w1")
    await world.append(*[trajectory(w) for w in first[:12]])
    await world.admit()
    manifest = (await world.lease(groups=3)).manifest
    before = await audit_store(world.do.redis, RUN)
    progress = await world.steps.progress(RUN, "train")
    redis_server.kill()
    await asyncio.to_thread(redis_server.start)
    client = connect(redis_server.url)
    transitions = Transitions(client)
    again = World(transitions, Store(transitions), Steps(transitions))
    assert await audit_store(client, RUN) == before
    assert await again.steps.progress(RUN, "train") == progress
    assert (await again.lease(groups=3)).manifest == manifest
    refs = [pb.ClaimRef(key=w.key, attempt=w.attempt) for w in first[12:]]
    assert await again.store.heartbeat(RUN, "w1", refs) == [], "claims are still held"
    await asyncio.sleep(0.35)
    assert await reclaim_all(again.store, RUN) == (2, 0)
    work = await again.claim(64, "w2")
    assert [(w.key.group, w.key.sample, w.attempt) for w in work[:2]] == [(3, 0, 2), (3, 1, 2)]
    assert len(work) == 12, "nothing is queued twice, nothing is lost"
    await client.aclose()
