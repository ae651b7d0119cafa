"""Fakes of the gym's peers, for faults and for knowing exactly what was said. Real gRPC in between."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
import numpy as np
import pytest

from gym_svc.environments.base import Step
from gym_svc.service import GymApp
from gym_svc.settings import GymSettings
from protos.headrace.v1 import (
    buffer_pb2,
    buffer_pb2_grpc,
    gym_pb2,
    gym_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    types_pb2,
)
from services.runtime import rpc
from services.runtime.service import start_server

RUN = "run-1"


def work_of(
    group: int, sample: int = 0, *, agent: str = "single_turn", attempt: int = 1, **fields: Any
) -> Any:
    row = {
        "responses_create_params": {"input": "2+2?", **fields.pop("create", {})},
        "expected_answer": "4",
        **fields,
    }
    return buffer_pb2.Work(
        key=types_pb2.SampleKey(run=RUN, book="train", group=group, sample=sample),
        attempt=attempt,
        row_json=json.dumps(row),
        row_source=f"train.jsonl:{group + 1}",
        sampling=types_pb2.SamplingParams(temperature=1, top_p=1, top_k=-1, min_p=0, max_new_tokens=16),
        run_seed=7,
        agent=types_pb2.AgentRef(type="responses_api_agents", name=agent),
        queued_ns=time.time_ns(),
    )


class FakeBuffer(buffer_pb2_grpc.BufferServicer):
    """Hands out `queue`, records what comes back."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.appended: list[Any] = []
        self.failed: list[Any] = []
        self.beats: list[Any] = []
        self.claims: list[Any] = []
        self.lost: list[Any] = []
        self.status = buffer_pb2.APPEND_STATUS_ACCEPTED
        self.append_hook: Callable[[Any, Any], Any] | None = None
        self.changed = asyncio.Event()
        self.streams = 0

    async def Claim(self, request: Any, context: Any) -> Any:
        self.claims.append(request)
        end = time.monotonic() + min(0.1, request.wait_s)
        while not self.queue and time.monotonic() < end:
            await asyncio.sleep(0.005)
        work = [self.queue.popleft() for _ in range(min(len(self.queue), request.max_samples))]
        return buffer_pb2.ClaimResponse(work=work)

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        self.beats.append(request)
        lost, self.lost = self.lost, []
        return buffer_pb2.HeartbeatResponse(lost=lost)

    async def Append(self, request: Any, context: Any) -> Any:
        if self.append_hook is not None:
            await self.append_hook(request, context)
        self.appended.extend(request.trajectories)
        self.changed.set()
        results = [
            buffer_pb2.AppendResult(
                ref=buffer_pb2.ClaimRef(key=item.key, attempt=item.attempt), status=self.status
            )
            for item in request.trajectories
        ]
        return buffer_pb2.AppendResponse(results=results)

    async def AppendStream(self, request_iterator: Any, context: Any) -> Any:
        self.streams += 1
        parts = [chunk async for chunk in request_iterator]
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        return await self.Append(
            buffer_pb2.AppendRequest.FromString(b"".join(part.data for part in parts)), context
        )

    async def Fail(self, request: Any, context: Any) -> Any:
        self.failed.extend(request.failures)
        self.changed.set()
        return buffer_pb2.FailResponse(decisions=[buffer_pb2.FAIL_DECISION_RETRY] * len(request.failures))

    async def until(self, done: Callable[[], bool], timeout: float = 10.0) -> None:
        async with asyncio.timeout(timeout):
            while not done():
                await asyncio.sleep(0.005)


def answer(content: str, *, ids: list[int], rendered: list[int], **fields: Any) -> Any:
    fields.setdefault("finish_reason", types_pb2.FINISH_REASON_STOP)
    message = types_pb2.Message(role="assistant", content=content, tool_calls=fields.pop("calls", ()))
    return rollout_pb2.TurnResponse(
        rendered_ids=np.array(rendered, "<i4").tobytes(),
        sampled_ids=np.array(ids, "<i4").tobytes(),
        logprobs=fields.pop("logprobs", np.full(len(ids), -0.5, "<f4").tobytes()),
        versions=fields.pop("versions", np.full(len(ids), 3, "<i4").tobytes()),
        message=message,
        policy_versions=[types_pb2.PolicyVersion(number=3)],
        engine="engine-1",
        **fields,
    )


class FakeRollout(rollout_pb2_grpc.RolloutServicer):
    """Answers by `reply`, records the requests."""

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.renders: list[Any] = []
        self.reply: Callable[[Any], Any] = lambda request: answer("4", ids=[9, 2], rendered=[5, 6, 7])
        self.hold: asyncio.Event | None = None
        self.abort: tuple[grpc.StatusCode, str] | None = None
        self.cancelled = 0

    async def Turn(self, request: Any, context: Any) -> Any:
        self.turns.append(request)
        if self.abort is not None:
            await context.abort(*self.abort)
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return self.reply(request)

    async def Render(self, request: Any, context: Any) -> Any:
        self.renders.append(request)
        one = rollout_pb2.Rendered(
            ids=np.array([1, 2, 3, 4], "<i4").tobytes(),
            mask=bytes([0, 0, 1, 1]),
            segments=[
                types_pb2.Segment(source=types_pb2.SEGMENT_SOURCE_PROMPT, start=0, length=2),
                types_pb2.Segment(source=types_pb2.SEGMENT_SOURCE_SAMPLED, start=2, length=2),
            ],
        )
        return rollout_pb2.RenderResponse(rendered=[one] * len(request.conversations))


class FakeReward(reward_pb2_grpc.RewardsServicer):
    """1 for the answer "4", 0 otherwise, unless `reply` says something else."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.abort: tuple[grpc.StatusCode, str] | None = None
        self.reply: Callable[[Any], Any] = self.judge

    @staticmethod
    def judge(item: Any) -> Any:
        value = float(item.messages[-1].content == "4")
        stages = [types_pb2.RewardStage(name="verifier", value=value)]
        return reward_pb2.RewardResult(
            reward=types_pb2.Reward(value=value, stages=stages, verifier=item.verifier)
        )

    async def Score(self, request: Any, context: Any) -> Any:
        self.calls.append(request)
        if self.abort is not None:
            await context.abort(*self.abort)
        return reward_pb2.ScoreRewardsResponse(results=[self.reply(item) for item in request.items])


class Stack:
    """The real gym service between fakes."""

    def __init__(self) -> None:
        self.buffer = FakeBuffer()
        self.rollout = FakeRollout()
        self.reward = FakeReward()
        self.gym: Any = None
        self.server: Any = None

    async def setup(self, *, run: str = RUN, concurrency: int = 0, **env: Any) -> Any:
        env = {"default_verifier": "exact_answer", "claim_timeout_s": 0.3, **env}
        return await self.gym.Setup(
            gym_pb2.GymSetupRequest(run=run, env_json=json.dumps(env), concurrency=concurrency)
        )

    async def finish(self, *work: Any, **env: Any) -> None:
        """Set up, queue `work` and wait until each has ended."""
        self.buffer.queue.extend(work)
        await self.setup(**env)
        ended = lambda: len(self.buffer.appended) + len(self.buffer.failed)  # noqa: E731
        await self.buffer.until(lambda: ended() >= len(work))


async def serve_fake(add: Callable[[Any, Any], None], servicer: Any) -> tuple[Any, str]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def running_stack(home: Any) -> AsyncIterator[Stack]:
    stack = Stack()
    buffer, at_buffer = await serve_fake(buffer_pb2_grpc.add_BufferServicer_to_server, stack.buffer)
    rollout, at_rollout = await serve_fake(rollout_pb2_grpc.add_RolloutServicer_to_server, stack.rollout)
    reward, at_reward = await serve_fake(reward_pb2_grpc.add_RewardsServicer_to_server, stack.reward)
    settings = GymSettings(
        listen="127.0.0.1:0",
        home=home,
        buffer=at_buffer,
        rollout=at_rollout,
        reward=at_reward,
        drain_seconds=4,
    )
    stack.server = await start_server(GymApp(settings), settings)
    stack.gym = rpc.stub(gym_pb2_grpc.GymStub, stack.server.address, name="gym")
    try:
        yield stack
    finally:
        await stack.server.stop(3.1)
        await asyncio.gather(*(server.stop(0) for server in (buffer, rollout, reward)))
        await rpc.close_channels()


@pytest.fixture
async def stack(tmp_path: Any) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path) as made:
        yield made


class Doubler:
    """Two turns: asks for a number, doubles it, wants it back."""

    opened = 0
    closed = 0
    seeds: ClassVar[list[int]] = []

    def __init__(self, limit: int = 2) -> None:
        type(self).opened += 1
        self.limit = limit
        self.said: list[str] = []

    async def reset(self, row: Any, *, seed: int) -> Any:
        self.seeds.append(seed)
        return row.messages

    async def step(self, message: Any) -> Step:
        self.said.append(message.content)
        if message.content == "raise":
            raise KeyError("no such drawer")
        if message.content == "hang":
            await asyncio.sleep(60)
        if message.tool_calls:
            return Step(
                messages=[
                    types_pb2.Message(role="tool", content="8", tool_call_id=call.id)
                    for call in message.tool_calls
                ]
            )
        if len(self.said) >= self.limit:
            return Step(done=True)
        return Step(messages=[types_pb2.Message(role="user", content=f"twice {message.content} is?")])

    async def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def doubler(monkeypatch: pytest.MonkeyPatch) -> type[Doubler]:
    """The environment under the dotted path ``gym_test_plugin:Doubler``."""
    kind = type("Doubler", (Doubler,), {"opened": 0, "closed": 0, "seeds": []})
    module = types.ModuleType("gym_test_plugin")
    module.Doubler = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gym_test_plugin", module)
    return kind


@pytest.fixture
def make() -> Any:
    """Builders: ``make.work(...)``, ``make.answer(...)``, ``make.serve_policy()``."""

    async def serve_policy() -> tuple[FakeRollout, Any, str]:
        fake = FakeRollout()
        return fake, *(await serve_fake(rollout_pb2_grpc.add_RolloutServicer_to_server, fake))

    return types.SimpleNamespace(work=work_of, answer=answer, run=RUN, serve_policy=serve_policy)
