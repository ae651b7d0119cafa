"""The audit finds every kind of tampering, and says the same from the store and from the sealed file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from protos.headrace.v1 import types_pb2 as types
from services.buffer.audit import audit_file, audit_store, seal
from services.runtime.errors import NotFound
from tests.unit.buffer.world import RUN, World, spec, trajectory

P = f"hr:{{{RUN}}}:"


async def a_run(world: World) -> None:
    """Two steps trained, one of them durable, one group dropped, one open, and a closed validation book."""
    await world.setup(data_attempts=1, infrastructure_attempts=1)
    for step in (0, 1):
        await world.open(spec(2 * step, step=step), spec(2 * step + 1, step=step))
        await world.finish()
        await world.lease(step, groups=2)
        await world.commit(step)
    await world.steps.restore(RUN, types.Fence(epoch=2, step=1), 1)
    await world.lease(1, groups=2, epoch=2)
    await world.commit(1, epoch=2)
    await world.steps.mark_durable(RUN, types.Fence(epoch=2, step=0))
    await world.open(spec(4, step=2), spec(5, step=2), epoch=2)
    work = await world.claim()
    await world.fail(work[0])
    await world.append(trajectory(work[5]))
    await world.open(spec(0, samples=1), book="validation/1", epoch=2)
    await world.finish()
    await world.steps.close_book(RUN, "validation/1")


async def test_a_sound_run_balances_from_store_and_from_file(world: World, tmp_path: Path) -> None:
    await a_run(world)
    store = await audit_store(world.do.redis, RUN)
    assert store.balanced, list(store.imbalances)
    train, validation = store.books
    assert (train.groups.dispatched, train.groups.trained, train.groups.open) == (6, 4, 1)
    assert (train.samples.dispatched, train.samples.trained, train.samples.open) == (24, 16, 4)
    assert dict(train.samples.dropped) == {"infrastructure_error": 4}
    assert dict(validation.groups.dropped) == {"evaluated": 1}
    path = tmp_path / "ledger.jsonl"
    assert await seal(world.do.redis, RUN, path) == store.events
    await world.do.redis.flushall()
    sealed = audit_file(path)
    assert sealed.source == "sealed ledger"
    sealed.source = store.source
    assert sealed == store


async def test_there_is_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        audit_file(tmp_path / "ledger.jsonl")


async def delete_event(redis: Redis) -> None:
    entries = await redis.xrange(f"{P}ledger")
    await redis.xdel(f"{P}ledger", next(entry for entry, f in entries if f[b"k"] == b"train"))


async def delete_last_event(redis: Redis) -> None:
    (last,) = await redis.xrevrange(f"{P}ledger", count=1)
    await redis.xdel(f"{P}ledger", last[0])


async def forge_event(redis: Redis) -> None:
    seq = await redis.hincrby(f"{P}cfg", "seq", 1)
    fields = {"at": 1, "k": "train", "b": "train", "g": 2, "n": 4, "s": 2, "r": "", "e": 2}
    await redis.xadd(f"{P}ledger", fields, id=f"{seq}-0")


TAMPERING: dict[str, tuple[Callable[[Redis], Awaitable[object]], str]] = {
    "state": (lambda r: r.hset(f"{P}g:train:2", "state", "open"), "state is open in its record, trained"),
    "unknown state": (lambda r: r.hset(f"{P}g:train:2", "state", "gone"), "unknown state 'gone'"),
    "size": (lambda r: r.hset(f"{P}g:train:5", "n", "3"), "samples is 3 in its record, 4"),
    "step": (lambda r: r.hset(f"{P}g:train:5", "step", "9"), "target step is 9"),
    "trained step": (lambda r: r.hset(f"{P}g:train:2", "ts", "7"), "trained step is 7"),
    "reason": (lambda r: r.hset(f"{P}g:train:4", "reason", "age"), "reason is age in its record"),
    "sample": (lambda r: r.hset(f"{P}g:train:5", "s0", "d"), "trajectories is 2 in its record, 1"),
    "no field": (lambda r: r.hdel(f"{P}g:train:5", "s0"), "record of group 5 in train cannot be read"),
    "record lost": (lambda r: r.delete(f"{P}g:train:5"), "group 5 is in the ledger and has no record"),
    "record forged": (
        lambda r: r.hset(f"{P}g:train:77", mapping={"state": "open", "n": 0, "step": 0, "left": 0}),
        "group 77 has a record and is not in the ledger",
    ),
    "event lost": (delete_event, "the ledger jumps from event"),
    "last event lost": (delete_last_event, "the ledger ends at event"),
    "trained twice": (forge_event, "group 2 was trained at step 1 and again at step 2"),
}


@pytest.mark.parametrize("name", TAMPERING)
async def test_tampering_is_found_in_words(world: World, name: str, tmp_path: Path) -> None:
    await a_run(world)
    tamper, words = TAMPERING[name]
    await tamper(world.do.redis)
    store = await audit_store(world.do.redis, RUN)
    assert not store.balanced
    assert any(words in fault.text for fault in store.imbalances), [f.text for f in store.imbalances]
    await seal(world.do.redis, RUN, tmp_path / "ledger.jsonl")
    assert audit_file(tmp_path / "ledger.jsonl").imbalances == store.imbalances


async def test_a_lost_sample_record_breaks_the_balance_in_numbers(world: World) -> None:
    await a_run(world)
    await world.do.redis.delete(f"{P}g:train:5")
    texts = [fault.text for fault in (await audit_store(world.do.redis, RUN)).imbalances]
    assert "6 groups dispatched, but 4 trained + 1 dropped + 0 open = 5" in texts
    assert "24 samples dispatched, but 16 trained + 4 dropped + 0 open = 20" in texts


async def test_the_cached_counters_are_no_evidence(world: World) -> None:
    await a_run(world)
    await world.do.redis.hset(f"{P}n:train", "g:trained", "99")
    assert (await audit_store(world.do.redis, RUN)).balanced


async def test_a_changed_or_cut_sealed_ledger_is_found(world: World, tmp_path: Path) -> None:
    await a_run(world)
    path = tmp_path / "ledger.jsonl"
    await seal(world.do.redis, RUN, path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert [f.text for f in audit_file(path).imbalances] == ["the ledger ends without a seal: it was cut"]
    row = json.loads(lines[3])
    row["event"]["at_ns"] += 1
    path.write_text("".join([*lines[:3], json.dumps(row) + "\n", *lines[4:]]))
    assert [f.text for f in audit_file(path).imbalances] == [
        "the ledger does not match its seal: it was changed"
    ]
    path.write_text("".join([*lines[:3], "{broken\n", *lines[4:]]))
    assert any("line 4 cannot be read" in f.text for f in audit_file(path).imbalances)


async def test_a_busy_run_can_be_audited(world: World) -> None:
    await world.setup()
    stop = asyncio.Event()

    async def work() -> None:
        for step in range(1000):
            if stop.is_set():
                return
            await world.open(*[spec(4 * step + i, step=step) for i in range(4)])
            await world.finish()
            await world.lease(step, groups=4)
            await world.commit(step)

    worker = asyncio.create_task(work())
    for _ in range(10):
        await asyncio.sleep(0.02)
        verdict = await audit_store(world.do.redis, RUN)
        assert verdict.balanced, list(verdict.imbalances)
    stop.set()
    await worker
    assert verdict.events > 100
