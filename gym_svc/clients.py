"""The services that a sample needs, as the gym calls them.

Invariants
- What cannot be answered is raised as :class:`~gym_svc.failures.SampleError`, never answered by a default.
- Renderings and rewards travel in small batches; a batch that fails fails its samples, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from gym_svc.batching import Batcher
from gym_svc.failures import INFRASTRUCTURE, VERIFIER, SampleError, failed_call
from protos.headrace.v1 import (
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    types_pb2,
)  # fmt: skip
from services.runtime.errors import HeadraceError, Internal

CLOSE_SECONDS = 2.0


class Policy:
    """The rollout service."""

    def __init__(self, stub: rollout_pb2_grpc.RolloutAsyncStub, run: str) -> None:
        self._stub = stub
        self._run = run
        self._renders: Batcher[rollout_pb2.Conversation, rollout_pb2.Rendered] = Batcher(self._render)

    async def turn(self, request: rollout_pb2.TurnRequest) -> rollout_pb2.TurnResponse:
        """One turn; the rollout service repeats it elsewhere when an engine fails."""
        try:
            return await self._stub.Turn(request)
        except HeadraceError as exc:
            raise failed_call(exc, "Rollout.Turn") from exc

    async def render(self, conversation: rollout_pb2.Conversation) -> rollout_pb2.Rendered:
        """Ids and mask of a finished conversation."""
        try:
            return await self._renders.submit(conversation)
        except HeadraceError as exc:
            raise failed_call(exc, "Rollout.Render") from exc

    async def _render(self, items: Sequence[rollout_pb2.Conversation]) -> Sequence[rollout_pb2.Rendered]:
        answer = await self._stub.Render(rollout_pb2.RenderRequest(run=self._run, conversations=items))
        if len(answer.rendered) != len(items):
            raise Internal(
                f"{len(items)} conversations, {len(answer.rendered)} renderings", where="Rollout.Render"
            )
        return list(answer.rendered)

    async def close(self) -> None:
        """Finish open batches."""
        await self._renders.close(CLOSE_SECONDS)


class Scorer:
    """The reward service."""

    def __init__(self, stub: reward_pb2_grpc.RewardsAsyncStub, run: str) -> None:
        self._stub = stub
        self._run = run
        self._batches: Batcher[reward_pb2.RewardItem, reward_pb2.RewardResult] = Batcher(self._score)

    async def score(self, item: reward_pb2.RewardItem) -> types_pb2.Reward:
        """The reward of one finished sample; raises SampleError when there is none."""
        try:
            result = await self._batches.submit(item)
        except HeadraceError as exc:
            raise failed_call(exc, "Rewards.Score") from exc
        if result.HasField("reward"):
            return result.reward
        if result.HasField("failure"):
            known = result.failure.outcome in (VERIFIER, INFRASTRUCTURE)
            outcome = result.failure.outcome if known else VERIFIER
            raise SampleError(outcome, f"{item.verifier}: {result.failure.message}")
        raise SampleError(INFRASTRUCTURE, "Rewards.Score gave neither a reward nor a failure")

    async def _score(self, items: Sequence[reward_pb2.RewardItem]) -> Sequence[reward_pb2.RewardResult]:
        answer = await self._stub.Score(reward_pb2.ScoreRewardsRequest(run=self._run, items=items))
        if len(answer.results) != len(items):
            raise Internal(f"{len(items)} items, {len(answer.results)} results", where="Rewards.Score")
        return list(answer.results)

    async def close(self) -> None:
        """Finish open batches."""
        await self._batches.close(CLOSE_SECONDS)
