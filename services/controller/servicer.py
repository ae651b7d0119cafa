"""The Runs service."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pydantic

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from services.buffer.audit import audit_store
from services.controller import summary
from services.controller.scheduler import Scheduler
from services.controller.settings import ControllerSettings
from services.controller.store import TERMINAL
from services.recipe import Recipe
from services.recipe.load import to_yaml
from services.runtime.errors import Conflict, InvalidInput, Refused
from services.runtime.home import Home, write_atomic

WATCH_WAIT_S = 2.0
MAX_STEPS = 1000


def new_run_id(name: str) -> str:
    """``DATE-TIME-NAME-xxxx``; sorts by time."""
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32] or "run"
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + f"{safe}-{uuid.uuid4().hex[:4]}"


class RunsServicer(runs_pb2_grpc.RunsServicer):
    """Submit, look at, watch, cancel and audit runs."""

    def __init__(self, settings: ControllerSettings, scheduler: Scheduler, client: Any) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._store = scheduler.store
        self._client = client

    async def Submit(
        self, request: runs_pb2.SubmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.Run:
        """Queue a new run, or take up an interrupted one under its own id."""
        run = request.run
        known = await self._store.fields(run) if run else {}
        if known:
            return await self._resume(run, known, request.recipe_json)
        try:
            recipe = Recipe.model_validate_json(request.recipe_json)
        except pydantic.ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidInput(f"The recipe is wrong: {first['msg']}", where=where) from exc
        run = run or new_run_id(recipe.name)
        paths = Home(self._settings.home).run(run).create()
        if not paths.recipe.exists():
            write_atomic(paths.recipe, to_yaml(recipe))
        await self._store.create(
            run,
            {
                "status": runs_pb2.RUN_STATUS_QUEUED, "name": recipe.name, "kind": recipe.kind,
                "max_steps": recipe.max_steps, "recipe": recipe.model_dump_json(),
                "origins": request.origins_json, "stack": self._settings.stack,
            },
        )  # fmt: skip
        await self._store.emit(run, "status", "queued")
        return await self._store.get(run)

    async def _resume(self, run: str, known: dict[str, str], recipe_json: str) -> runs_pb2.Run:
        """The same id again: an interrupted or failed run goes on; another recipe is refused."""
        if recipe_json and json.loads(recipe_json) != json.loads(known["recipe"]):
            raise Conflict(
                f"Run {run} exists with another recipe", do="Submit without a run id for a new run."
            )
        status = int(known["status"])
        if status not in TERMINAL and self._scheduler.drives(run):
            await self._scheduler.resume(run)
            return await self._store.get(run)
        if status in TERMINAL:
            if status == runs_pb2.RUN_STATUS_COMPLETED:
                return await self._store.get(run)
            if status == runs_pb2.RUN_STATUS_CANCELLED:
                raise Refused(f"Run {run} was cancelled", do="Start a new run.")
            paths = Home(self._settings.home).run(run)
            for stale in (summary.summary_path(paths), paths.ledger):
                stale.unlink(missing_ok=True)
        await self._store.update(
            run,
            status=runs_pb2.RUN_STATUS_QUEUED,
            stack=self._settings.stack,
            error="",
            cancel="",
            paused="",
            ended_ns=0,
        )
        await self._store.emit(run, "status", "resumed")
        return await self._store.get(run)

    async def Get(
        self, request: runs_pb2.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.Run:
        """One run with its summary."""
        message = await self._store.get(request.run)
        sealed = summary.sealed(Home(self._settings.home).run(request.run))
        message.summary_json = json.dumps(
            sealed or await summary.build(self._store, self._client, request.run)
        )
        return message

    async def List(
        self, request: runs_pb2.ListRunsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.ListRunsResponse:
        """The newest runs first."""
        return runs_pb2.ListRunsResponse(runs=await self._store.newest(request.limit or 50))

    async def Watch(
        self, request: runs_pb2.WatchRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[runs_pb2.RunEvent]:
        """Events from ``from_sequence`` on, until the run has ended and all were sent."""
        after = max(0, request.from_sequence - 1)
        while True:
            ended = (await self._store.get(request.run)).status in TERMINAL
            events = await self._store.events(request.run, after, 0.01 if ended else WATCH_WAIT_S)
            for event in events:
                after = event.sequence
                yield event
            if ended and not events:
                return

    async def Cancel(
        self, request: runs_pb2.CancelRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.Run:
        """End a run; its open groups are dropped and counted."""
        await self._scheduler.cancel(request.run, request.reason)
        return await self._store.get(request.run)

    async def Pause(
        self, request: runs_pb2.PauseRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.Run:
        """Hold a run before its next step."""
        await self._scheduler.pause(request.run)
        return await self._store.get(request.run)

    async def Resume(
        self, request: runs_pb2.ResumeRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.Run:
        """Let a paused run go on."""
        await self._scheduler.resume(request.run)
        return await self._store.get(request.run)

    async def ListSteps(
        self, request: runs_pb2.ListStepsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.ListStepsResponse:
        """Records of finished steps, oldest first."""
        await self._store.get(request.run)
        records = await self._store.steps(request.run)
        wanted = [step for step in records if step >= request.from_step]
        limit = min(request.limit or MAX_STEPS, MAX_STEPS)
        return runs_pb2.ListStepsResponse(steps=[step_message(records[step]) for step in wanted[:limit]])

    async def Audit(
        self, request: runs_pb2.AuditRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runs_pb2.AuditResponse:
        """Prove the books from the store."""
        await self._store.get(request.run)
        return await audit_store(self._client, request.run)


def step_message(record: dict[str, Any]) -> runs_pb2.StepRecord:
    """A step's record as the contract shows it."""
    return runs_pb2.StepRecord(
        step=record["step"],
        metrics=record["metrics"],
        seconds=record["seconds"],
        groups=record["groups"],
        incarnation=record["incarnation"],
    )
