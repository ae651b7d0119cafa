"""The worker's gRPC service: Engine, as one process with its model answers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import grpc.aio

from protos.headrace.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_svc.engine.lines import Assignment
from rollout_svc.engine.rendering import Rendering
from services.runtime.errors import NotReady, Unsupported
from services.runtime.service import ServiceApp

if TYPE_CHECKING:
    from rollout_svc.engine.turns import Turns
    from rollout_svc.engine.updates import Updates

ENGINE_SERVICE = "headrace.v1.Engine"


class EngineApp(ServiceApp, rollout_pb2_grpc.EngineServicer):
    """Serves one assignment; ``turns`` and ``updates`` are None for an engine that only renders.

    ``give_up`` ends the process: a worker serves one run in its life, and its host starts the next.
    """

    name: ClassVar[str] = "engine"

    def __init__(
        self,
        assignment: Assignment,
        info: Callable[[], rollout_pb2.EngineInfo],
        rendering: Rendering,
        turns: Turns | None,
        updates: Updates | None,
        give_up: Callable[[], None],
    ) -> None:
        self._assignment = assignment
        self._info = info
        self._rendering = rendering
        self._turns = turns
        self._updates = updates
        self._give_up = give_up

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Serve Engine."""
        rollout_pb2_grpc.add_EngineServicer_to_server(self, server)
        return (ENGINE_SERVICE,)

    async def draining(self) -> None:
        """Turns that an update holds back would not end within the drain."""
        if self._updates is not None:
            await self._updates.leave()

    async def stop(self) -> None:
        """End the rendering thread."""
        self._rendering.close()

    async def Setup(self, request: rollout_pb2.EngineSetupRequest, context: object) -> rollout_pb2.EngineInfo:
        """A no-op for this worker's own run; another run gets a fresh worker."""
        if Assignment.of(request) == self._assignment:
            return self._info()
        self._give_up()
        raise NotReady(
            "The engine restarts for another run", where=f"pid {os.getpid()}", do="Set up its successor."
        )

    async def Describe(self, request: object, context: object) -> rollout_pb2.EngineInfo:
        """What this engine is and which version it holds."""
        return self._info()

    async def Turn(self, request: rollout_pb2.TurnRequest, context: object) -> rollout_pb2.TurnResponse:
        """One turn."""
        return await self._sampling().turn(request)

    async def Render(self, request: rollout_pb2.RenderRequest, context: object) -> rollout_pb2.RenderResponse:
        """Whole conversations."""
        return await self._rendering.render(request)

    async def Score(
        self, request: rollout_pb2.ScoreTokensRequest, context: object
    ) -> rollout_pb2.ScoreTokensResponse:
        """Log-probabilities of given tokens."""
        return await self._sampling().score(request)

    async def Pause(
        self, request: rollout_pb2.PauseEngineRequest, context: object
    ) -> rollout_pb2.PauseEngineResponse:
        """vLLM's pause."""
        await self._updating().pause(request)
        return rollout_pb2.PauseEngineResponse()

    async def Resume(self, request: object, context: object) -> rollout_pb2.ResumeEngineResponse:
        """vLLM's resume."""
        await self._updating().resume()
        return rollout_pb2.ResumeEngineResponse()

    async def BeginUpdate(
        self, request: rollout_pb2.BeginUpdateRequest, context: object
    ) -> rollout_pb2.BeginUpdateResponse:
        """Enter an update."""
        return rollout_pb2.BeginUpdateResponse(plan_known=await self._updating().begin(request))

    async def LoadWeights(
        self, request: rollout_pb2.LoadWeightsRequest, context: object
    ) -> rollout_pb2.LoadWeightsResponse:
        """One chunk."""
        return rollout_pb2.LoadWeightsResponse(loaded=await self._updating().load(request))

    async def FinishUpdate(
        self, request: rollout_pb2.FinishUpdateRequest, context: object
    ) -> rollout_pb2.FinishUpdateResponse:
        """Leave the update."""
        return await self._updating().finish(request.generation)

    async def CommitVersion(
        self, request: rollout_pb2.CommitVersionRequest, context: object
    ) -> rollout_pb2.CommitVersionResponse:
        """Serve under this version."""
        await self._updating().commit(request)
        return rollout_pb2.CommitVersionResponse()

    def _sampling(self) -> Turns:
        if self._turns is None:
            raise _render_only()
        return self._turns

    def _updating(self) -> Updates:
        if self._updates is None:
            raise _render_only()
        return self._updates


def _render_only() -> Unsupported:
    return Unsupported(
        "This engine renders only", where="HEADRACE_ENGINE_BACKEND=render", reason="RENDER_ONLY"
    )
