"""A pool whose workers are real processes that never become engines."""

from __future__ import annotations

import asyncio

import psutil

from rollout_svc.engine import pool as pool_module
from rollout_svc.engine.pool import MAX_FAILURES, WorkerPool
from rollout_svc.engine.settings import EngineSettings
from services.runtime.errors import NotReady


async def test_workers_that_die_again_and_again_are_told(monkeypatch):
    monkeypatch.setattr(pool_module, "BACKOFF_SECONDS", (0.01, 0.02))
    replaced, told = [], asyncio.get_running_loop().create_future()
    pool = WorkerPool(
        EngineSettings(backend="render"), lambda engine, _: replaced.append(engine), told.set_result
    )
    await pool.start()
    try:
        killed = set()
        async with asyncio.timeout(30):
            while not told.done():
                try:
                    pid = pool.worker.pid
                except NotReady:
                    pid = 0
                if pid and pid not in killed:
                    killed.add(pid)
                    psutil.Process(pid).kill()
                await asyncio.sleep(0.01)
    finally:
        await pool.stop()
    error = told.result()
    assert error.reason == "CRASH_LOOP"
    assert len(set(replaced)) == len(killed) == MAX_FAILURES
