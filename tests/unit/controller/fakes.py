"""The controller's peers as small in-memory servers over real gRPC, with switches for faults."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from protos.headrace.v1 import (
    buffer_pb2,
    buffer_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)  # fmt: skip
from services.runtime.errors import HeadraceError, to_status

Context = grpc.aio.ServicerContext[Any, Any]


async def fail(context: Context, exc: HeadraceError) -> None:
    status = to_status(exc)
    await context.abort(status.code, status.details, status.trailing_metadata)


@dataclass
class FakeBuffer(buffer_pb2_grpc.BufferServicer):
    """Groups complete the moment they are opened, but for those of ``drop``."""

    groups: dict[str, dict[int, buffer_pb2.GroupSpec]] = field(default_factory=dict)
    drop: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)
    durable_step: int = -1
    restores: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    seen: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)

    async def Setup(self, request: buffer_pb2.BufferSetupRequest, context: Context) -> Any:
        self.seen |= {"max_age": request.max_age, "assigned": request.gym.run}
        return buffer_pb2.BufferSetupResponse()

    async def OpenGroups(self, request: buffer_pb2.OpenGroupsRequest, context: Context) -> Any:
        self.calls.append((f"open {request.book}", request.fence.step))
        book = self.groups.setdefault(request.book, {})
        for spec in request.groups:
            book.setdefault(spec.group, spec)
        return buffer_pb2.OpenGroupsResponse(opened=len(request.groups))

    async def Lease(self, request: buffer_pb2.LeaseRequest, context: Context) -> Any:
        step = request.fence.step
        self.calls.append(("lease", step))
        self.seen["order"] = request.order
        self.epochs.append(request.fence.epoch)
        live = [
            g
            for g in self.groups.get("train", {}).values()
            if g.target_step == step and g.group not in self.drop
        ]
        if len(live) < request.groups:
            return buffer_pb2.LeaseResponse(ready=len(live), missing=request.groups - len(live))
        manifest = buffer_pb2.Manifest(run=request.run, book="train", step=step)
        for spec in sorted(live, key=lambda g: g.group):
            samples = [
                buffer_pb2.ManifestSample(
                    sample=i, attempt=1, tokens=8, sampled_tokens=4, reward=float(i % 2)
                )
                for i in range(spec.samples)
            ]
            manifest.groups.append(buffer_pb2.ManifestGroup(group=spec.group, samples=samples))
        return buffer_pb2.LeaseResponse(manifest=manifest)

    async def Commit(self, request: buffer_pb2.CommitRequest, context: Context) -> Any:
        for spec in self.groups["train"].values():
            if spec.target_step == request.fence.step and spec.group not in self.drop:
                self.trained[spec.group] = request.fence.step
        return buffer_pb2.CommitResponse()

    async def MarkDurable(self, request: buffer_pb2.MarkDurableRequest, context: Context) -> Any:
        self.durable_step = request.fence.step
        return buffer_pb2.MarkDurableResponse()

    async def Release(self, request: buffer_pb2.ReleaseRequest, context: Context) -> Any:
        self.seen["released"] = request.run
        return buffer_pb2.ReleaseResponse()

    async def Restore(self, request: buffer_pb2.RestoreRequest, context: Context) -> Any:
        self.restores.append(request.completed_steps)
        back = [g for g, step in self.trained.items() if step >= request.completed_steps]
        for group in back:
            del self.trained[group]
        return buffer_pb2.RestoreResponse(groups=len(back))

    async def DropOpen(self, request: buffer_pb2.DropOpenRequest, context: Context) -> Any:
        return buffer_pb2.DropOpenResponse()

    async def Progress(self, request: buffer_pb2.ProgressRequest, context: Context) -> Any:
        count = len(self.groups.get(request.book, {}))
        slow = request.book in self.slow
        if slow:
            await asyncio.sleep(0.02)
        return buffer_pb2.ProgressResponse(
            samples=buffer_pb2.BookCounts(dispatched=count), samples_done=count, samples_claimed=int(slow)
        )

    async def CloseBook(self, request: buffer_pb2.CloseBookRequest, context: Context) -> Any:
        results = [
            buffer_pb2.SampleResult(
                group=g, outcome=types_pb2.OUTCOME_COMPLETED, reward=float(g % 2), sampled_tokens=3
            )
            for g in self.groups.get(request.book, {})
        ]
        counts = buffer_pb2.BookCounts(dispatched=len(results), trained=len(results))
        return buffer_pb2.CloseBookResponse(results=results, groups=counts, samples=counts)


@dataclass
class FakeTrainer(trainer_pb2_grpc.TrainerServicer):
    """Counts steps; ``crash`` makes it a new process that remembers its last checkpoint alone."""

    process: str = "life-1"
    run: str = ""
    completed: int = 0
    saved: int = 0
    steps: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    crash_before: set[int] = field(default_factory=set)
    delay_s: float = 0.0

    def crash(self) -> None:
        self.process = f"life-{uuid.uuid4().hex[:6]}"
        self.run, self.completed = "", 0

    def _state(self) -> trainer_pb2.TrainerState:
        return trainer_pb2.TrainerState(
            run=self.run, ready=True, completed_steps=self.completed, process=self.process, vocab_size=300
        )

    async def Setup(self, request: trainer_pb2.TrainerSetupRequest, context: Context) -> Any:
        if self.run != request.run:
            self.run, self.completed = request.run, self.saved
        return self._state()

    async def Status(self, request: trainer_pb2.TrainerStatusRequest, context: Context) -> Any:
        return self._state()

    async def Step(self, request: trainer_pb2.StepRequest, context: Context) -> Any:
        await asyncio.sleep(self.delay_s)
        step = request.fence.step
        if step in self.crash_before:
            self.crash_before.discard(step)
            self.crash()
            await asyncio.sleep(30)
        repeated = step == self.completed - 1
        if not repeated:
            assert step == self.completed, (step, self.completed)
            self.completed += 1
            self.steps.append((step, tuple(g.group for g in request.manifest.groups)))
        return trainer_pb2.StepResponse(step=step, metrics={"loss": 0.5}, repeated=repeated, trained_tokens=4)

    async def Save(self, request: trainer_pb2.SaveRequest, context: Context) -> Any:
        self.saved = self.completed
        return trainer_pb2.SaveResponse(path="step", completed_steps=self.completed)


@dataclass
class FakeRefit(refit_pb2_grpc.RefitServicer):
    """Records what was published."""

    published: list[tuple[int, int]] = field(default_factory=list)
    error: HeadraceError | None = None
    spare: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)

    async def LeaseEngines(self, request: refit_pb2.LeaseEnginesRequest, context: Context) -> Any:
        self.leases.append(request.book)
        number = self.held.setdefault(request.book, self.published[-1][1])
        version = types_pb2.PolicyVersion(number=number)
        return refit_pb2.LeaseEnginesResponse(engines=self.spare[: request.engines], version=version)

    async def ReleaseEngines(self, request: refit_pb2.ReleaseEnginesRequest, context: Context) -> Any:
        self.released.append(request.book)
        return refit_pb2.ReleaseEnginesResponse()

    async def Setup(self, request: refit_pb2.RefitSetupRequest, context: Context) -> Any:
        return refit_pb2.RefitSetupResponse()

    async def WatchRoster(
        self, request: refit_pb2.WatchRosterRequest, context: Context
    ) -> AsyncIterator[Any]:
        info = rollout_pb2.EngineInfo(engine="e", name="vllm", engine_version="0.0", ready=True)
        yield refit_pb2.Roster(engines=[refit_pb2.RosterEntry(info=info)])

    async def Publish(self, request: refit_pb2.PublishRequest, context: Context) -> Any:
        if self.error is not None:
            await fail(context, self.error)
        version = (request.version.incarnation, request.version.number)
        if not self.published or self.published[-1] != version:
            self.published.append(version)
        return refit_pb2.PublishResponse(version=request.version)


class FakeRollout(rollout_pb2_grpc.RolloutServicer):
    async def Setup(self, request: rollout_pb2.RolloutSetupRequest, context: Context) -> Any:
        return rollout_pb2.RolloutSetupResponse()

    async def Status(self, request: rollout_pb2.RolloutStatusRequest, context: Context) -> Any:
        return rollout_pb2.RolloutStatusResponse()


@dataclass
class FakeRewards(reward_pb2_grpc.RewardsServicer):
    error: HeadraceError | None = None

    async def Setup(self, request: reward_pb2.RewardSetupRequest, context: Context) -> Any:
        if self.error is not None:
            await fail(context, self.error)
        return reward_pb2.RewardSetupResponse()


class FakeStack:
    """All peers behind one port."""

    def __init__(self) -> None:
        self.buffer = FakeBuffer()
        self.trainer = FakeTrainer()
        self.refit = FakeRefit()
        self.rewards = FakeRewards()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        buffer_pb2_grpc.add_BufferServicer_to_server(self.buffer, self._server)
        trainer_pb2_grpc.add_TrainerServicer_to_server(self.trainer, self._server)
        refit_pb2_grpc.add_RefitServicer_to_server(self.refit, self._server)
        rollout_pb2_grpc.add_RolloutServicer_to_server(FakeRollout(), self._server)
        reward_pb2_grpc.add_RewardsServicer_to_server(self.rewards, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
