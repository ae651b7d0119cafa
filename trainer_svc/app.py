"""The gRPC face of rank 0. Free of torch: handlers queue commands and wait, Status reads a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import grpc.aio

from protos.headrace.v1 import rollout_pb2, trainer_pb2, trainer_pb2_grpc
from services.runtime import rpc
from services.runtime.errors import NotReady
from services.runtime.service import ServiceApp
from trainer_svc.commands import Commands, Snapshot

if TYPE_CHECKING:
    from trainer_svc.trainer import Trainer

Context = grpc.aio.ServicerContext[Any, Any]


class Handler(Protocol):
    """A command of the trainer, looked up once it is loaded."""

    def __call__(self, trainer: Trainer) -> Callable[[Any], Any]:
        """The bound method."""
        ...


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Hands each call to the main thread."""

    def __init__(self, app: TrainerApp) -> None:
        self._app = app

    async def Setup(self, request: trainer_pb2.TrainerSetupRequest, _: Context) -> trainer_pb2.TrainerState:
        """Load a run."""
        return await self._app.command("Setup", lambda trainer: trainer.setup, request)  # type: ignore[no-any-return]

    async def Status(self, _: trainer_pb2.TrainerStatusRequest, __: Context) -> trainer_pb2.TrainerState:
        """Answered at once."""
        return self._app.snapshot.read(self._app.commands.busy_with)

    async def Step(self, request: trainer_pb2.StepRequest, _: Context) -> trainer_pb2.StepResponse:
        """Train one step."""
        return await self._app.command("Step", lambda trainer: trainer.step, request)  # type: ignore[no-any-return]

    async def Save(self, request: trainer_pb2.SaveRequest, _: Context) -> trainer_pb2.SaveResponse:
        """Write a checkpoint."""
        return await self._app.command("Save", lambda trainer: trainer.save, request)  # type: ignore[no-any-return]

    async def Export(self, request: trainer_pb2.ExportRequest, _: Context) -> trainer_pb2.ExportResponse:
        """Write a Hugging Face directory."""
        return await self._app.command("Export", lambda trainer: trainer.export, request)  # type: ignore[no-any-return]

    async def StageWeights(
        self, request: trainer_pb2.StageWeightsRequest, _: Context
    ) -> trainer_pb2.StageWeightsResponse:
        """Stage weights for engines."""
        return await self._app.command("StageWeights", lambda trainer: trainer.stage, request)  # type: ignore[no-any-return]

    async def ReleaseWeights(
        self, request: trainer_pb2.ReleaseWeightsRequest, _: Context
    ) -> trainer_pb2.ReleaseWeightsResponse:
        """Release staged weights."""
        return await self._app.command("ReleaseWeights", lambda trainer: trainer.release, request)  # type: ignore[no-any-return]

    async def Score(
        self, request: rollout_pb2.ScoreTokensRequest, _: Context
    ) -> rollout_pb2.ScoreTokensResponse:
        """Score tokens."""
        return await self._app.command("Score", lambda trainer: trainer.score, request)  # type: ignore[no-any-return]


class TrainerApp(ServiceApp):
    """Ready once the main thread has loaded its libraries and can take Setup."""

    name: ClassVar[str] = "trainer"

    def __init__(self, commands: Commands, snapshot: Snapshot) -> None:
        self.commands = commands
        self.snapshot = snapshot
        self._trainer: Trainer | None = None

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicer."""
        trainer_pb2_grpc.add_TrainerServicer_to_server(TrainerServicer(self), server)
        return [trainer_pb2.DESCRIPTOR.services_by_name["Trainer"].full_name]

    def loaded(self, trainer: Trainer) -> None:
        """The main thread can take commands from now on."""
        self._trainer = trainer
        self.readiness_changed()

    def readiness(self) -> tuple[bool, str]:
        """Whether Setup can be taken."""
        return self._trainer is not None, "" if self._trainer is not None else "loading libraries"

    async def command(self, name: str, handler: Handler, request: Any) -> Any:
        """Run a command on the main thread and wait for its answer."""
        if self._trainer is None:
            raise NotReady("The trainer still loads its libraries", where=f"Trainer.{name}", do="Try again.")
        method = handler(self._trainer)
        return await asyncio.wrap_future(self.commands.submit(name, lambda: method(request)))

    async def stop(self) -> None:
        """Close the connection to the buffer."""
        await rpc.close_channels()
