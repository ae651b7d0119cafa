"""The worker of one run: claims samples, works on them, hands them in.

Invariants
- At most ``concurrency`` samples are in flight; claims are taken in batches, up to the free slots.
- A claim that was answered is never forgotten: after a stop it is finished or given back.
- Losing the buffer, the policy or the reward service ends no worker: it goes on as soon as they are back.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from gym_svc.clients import Policy, Scorer
from gym_svc.config import EnvConfig
from gym_svc.failures import INFRASTRUCTURE, SampleError
from gym_svc.held import Held, beat
from gym_svc.outbox import Outbox
from gym_svc.plans import Planner
from gym_svc.sample import Bench, play, report
from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc, reward_pb2_grpc, rollout_pb2_grpc
from services.runtime.errors import HeadraceError
from services.runtime.logs import bind_ids, get_logger
from services.runtime.retry import backoff

# Short, because a stop waits for the claim under way: an unread answer is lost until it expires.
CLAIM_WAIT_S = 1.0
# Slots become free one by one; so long a pause lets the next claim take several.
GATHER_S = 0.004
GIVE_BACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Stubs:
    """The services that a worker talks to."""

    buffer: buffer_pb2_grpc.BufferAsyncStub
    rollout: rollout_pb2_grpc.RolloutAsyncStub
    reward: reward_pb2_grpc.RewardsAsyncStub


class Worker:
    """Works for one run from :meth:`start` to :meth:`stop`."""

    def __init__(self, run: str, env: EnvConfig, stubs: Stubs, *, name: str, concurrency: int) -> None:
        self.run = run
        self.name = name
        self.concurrency = concurrency
        self.completed = 0
        self.failed = 0
        self.planner = Planner(env)
        self._env = env
        self._stubs = stubs
        self._held = Held()
        self._stopping = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._log = get_logger("gym")
        self._bench = Bench(
            run=run, worker=name, env=env, planner=self.planner, policy=Policy(stubs.rollout, run),
            scorer=Scorer(stubs.reward, run), outbox=Outbox(stubs.buffer, name),
        )  # fmt: skip

    @property
    def in_flight(self) -> int:
        """Samples being worked on."""
        return len(self._held)

    def start(self) -> None:
        """Begin to claim."""
        with bind_ids(run=self.run):
            self._loop = asyncio.create_task(self._claim_loop(), name="claims")
            beats = beat(self._stubs.buffer, self.run, self.name, self._held, self._env.heartbeat_s)
            self._beats = asyncio.create_task(beats, name="heartbeats")

    async def stop(self, drain_seconds: float) -> None:
        """Stop claiming; finish what is in flight within ``drain_seconds``, then give back."""
        end = time.monotonic() + drain_seconds
        self._stopping.set()
        self._held.changed.set()
        if self._loop is not None:
            await asyncio.wait([self._loop], timeout=CLAIM_WAIT_S + 2)
            self._loop.cancel()
        if not await self._held.wait_idle(max(0.0, end - time.monotonic())):
            await self._give_back()
        if self._beats is not None:
            self._beats.cancel()
        for part in (self._bench.policy, self._bench.scorer, self._bench.outbox):
            await part.close()

    async def _give_back(self) -> None:
        left = await self._held.cancel_all()
        reason = SampleError(INFRASTRUCTURE, f"given back: worker {self.name} is stopping")
        reports = [asyncio.create_task(report(self._bench.outbox, work, reason)) for work in left]
        if reports:
            await asyncio.wait(reports, timeout=GIVE_BACK_S)

    async def _claim_loop(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            free = await self._free_slots()
            if self._stopping.is_set():
                return
            request = buffer_pb2.ClaimRequest(
                run=self.run, worker=self.name, max_samples=free, wait_s=CLAIM_WAIT_S
            )
            try:
                answer = await self._stubs.buffer.Claim(request)
            except Exception as exc:  # noqa: BLE001 (whatever happens to a claim, the worker goes on)
                await self._after_failed_claim(exc, failures)
                failures += 1
                continue
            failures = 0
            for work in answer.work:
                self._held.take(work, lambda work=work: self._work_on(work))  # type: ignore[misc]

    async def _free_slots(self) -> int:
        """Wait for a free slot; returns how many there are."""
        while len(self._held) >= self.concurrency and not self._stopping.is_set():
            self._held.changed.clear()
            await self._held.changed.wait()
        if self._held:
            await asyncio.sleep(GATHER_S)
        return max(1, self.concurrency - len(self._held))

    async def _after_failed_claim(self, exc: Exception, failures: int) -> None:
        if failures == 0:
            unexpected = None if isinstance(exc, HeadraceError) else exc
            self._log.warning("claim failed", error=str(exc), exc_info=unexpected)
        await asyncio.sleep(max(0.05, backoff(failures)))

    async def _work_on(self, work: buffer_pb2.Work) -> None:
        if await play(self._bench, work):
            self.completed += 1
        else:
            self.failed += 1
