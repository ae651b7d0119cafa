"""The reward service.

Invariants
- One run at a time; a new life of this process has none and answers Score with NO_RUN until Setup.
- Starting needs no verifier process: those come up when a run names a verifier that is isolated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from protos.headrace.v1 import reward_pb2, reward_pb2_grpc
from reward_svc.config import parse_env
from reward_svc.isolation import VerifierPool
from reward_svc.scoring import Scoring
from reward_svc.settings import RewardSettings
from reward_svc.verifiers.registry import BUILT_IN, BuiltIn, Verifier
from services.runtime.errors import InvalidInput, NotReady
from services.runtime.logs import get_logger
from services.runtime.service import ServiceApp, serve

SERVICE = "headrace.v1.Rewards"
FALLBACK_SECONDS = 120.0


class RewardApp(ServiceApp, reward_pb2_grpc.RewardsServicer):
    """The service."""

    name = "reward"

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self.pool: VerifierPool | None = None
        """Verifier processes; from start to stop."""
        self._scoring: Scoring | None = None
        self._given: tuple[str, str] | None = None
        self._log = get_logger("reward")

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """See ServiceApp."""
        reward_pb2_grpc.add_RewardsServicer_to_server(self, server)
        return [SERVICE]

    async def start(self) -> None:
        """See ServiceApp."""
        self.pool = VerifierPool(self._settings.workers)

    async def stop(self) -> None:
        """See ServiceApp."""
        if self.pool is not None:
            await self.pool.close()

    async def Setup(
        self, request: reward_pb2.RewardSetupRequest, context: Any
    ) -> reward_pb2.RewardSetupResponse:
        """Take the verifiers and transforms of ``request.run``; a repeat changes nothing."""
        if not request.run:
            raise InvalidInput("run is empty", where="Rewards.Setup")
        given = (request.run, request.env_json)
        if given != self._given:
            assert self.pool is not None
            env = parse_env(request.env_json)
            limit = self._settings.time_limit_s
            self._scoring = Scoring(request.run, env, self.pool, time_limit_s=limit)
            self._given = given
            self._log.info("set up", run=request.run)
        return reward_pb2.RewardSetupResponse()

    async def Score(
        self, request: reward_pb2.ScoreRewardsRequest, context: Any
    ) -> reward_pb2.ScoreRewardsResponse:
        """One result for each item, in order."""
        scoring = self._scoring
        if scoring is None or scoring.run != request.run:
            raise NotReady(
                f"The reward service has no run {request.run!r}", do="Call Rewards.Setup.", reason="NO_RUN"
            )
        left = context.time_remaining()
        seconds = FALLBACK_SECONDS if left is None else float(left)
        results = await asyncio.gather(*(scoring.score(item, seconds) for item in request.items))
        return reward_pb2.ScoreRewardsResponse(results=results)

    async def ListVerifiers(
        self, request: reward_pb2.ListVerifiersRequest, context: Any
    ) -> reward_pb2.ListVerifiersResponse:
        """The run's verifiers, or the built-in ones before Setup."""
        found: Mapping[str, BuiltIn | Verifier] = BUILT_IN
        if self._scoring is not None:
            found = self._scoring.verifiers
        listed = [
            reward_pb2.Verifier(name=name, description=known.description, isolated=bool(known.path))
            for name, known in sorted(found.items())
        ]
        return reward_pb2.ListVerifiersResponse(verifiers=listed)


def main() -> int:
    """``headrace serve reward``."""
    settings = RewardSettings.load()
    return serve(RewardApp(settings), settings)
