"""Runs: list, look at, submit, pause, resume, cancel, audit, steps."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from protos.headrace.v1 import runs_pb2
from services.gateway.requests import RunId, ThePeers
from services.gateway.wire import finite, numbers, seconds, word
from services.recipe.load import from_foreign, to_json
from services.recipe.not_built import refuse_not_built
from services.runtime.errors import InvalidInput

router = APIRouter(tags=["runs"])
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/plain")
MOST_RUNS = 1000
MOST_STEPS = 1000


class Run(BaseModel):
    """A run. Times are seconds since 1970."""

    run: str
    name: str
    kind: str
    status: str = Field(description="queued, starting, running, paused, completed, failed or cancelled")
    phase: str
    completed_steps: int
    max_steps: int
    error: str
    created: float | None
    started: float | None
    ended: float | None


class RunDetail(Run):
    """A run with what `headrace runs show --json` prints."""

    summary: dict[str, Any]


class RunPage(BaseModel):
    """Newest first; ``next`` is the offset of the next page, null on the last."""

    runs: list[Run]
    next: int | None


class Submission(BaseModel):
    """A recipe as YAML text or as an object, whole (no ``defaults``), with KEY=VALUE overrides."""

    recipe: str | dict[str, Any]
    overrides: list[str] = Field(default_factory=list, max_length=1000)
    run: str = Field(default="", max_length=200, description="Empty: the controller makes an id.")


class Reason(BaseModel):
    """Why a run is cancelled."""

    reason: str = Field(default="", max_length=1000)


class Step(BaseModel):
    """One finished step."""

    step: int
    incarnation: int
    metrics: dict[str, float | None]
    seconds: dict[str, float | None] = Field(description="By phase.")
    groups: list[int]


class StepPage(BaseModel):
    """Oldest first; ``next`` is the step to go on from, null when there are no more for now."""

    steps: list[Step]
    next: int | None


class Series(BaseModel):
    """Metrics by name, each aligned with ``steps``; null where a step has no such metric."""

    steps: list[int]
    metrics: dict[str, list[float | None]]
    next: int | None


class Counts(BaseModel):
    """dispatched = trained + dropped + open."""

    dispatched: int
    trained: int
    open: int
    dropped: dict[str, int]


class BookAudit(BaseModel):
    """One book, recounted."""

    book: str
    groups: Counts
    samples: Counts


class Audit(BaseModel):
    """Whether the books balance."""

    run: str
    balanced: bool
    source: str
    events: int
    books: list[BookAudit]
    imbalances: list[str]


Limit = Annotated[int, Query(ge=1, le=MOST_RUNS)]
FromStep = Annotated[int, Query(ge=0, lt=2**32)]
StepLimit = Annotated[int, Query(ge=1, le=MOST_STEPS)]


@router.get("/runs")
async def list_runs(
    peers: ThePeers, limit: Limit = 50, offset: Annotated[int, Query(ge=0, le=100_000)] = 0
) -> RunPage:
    """Runs, newest first."""
    wanted = offset + limit + 1
    answer = await peers.runs.List(runs_pb2.ListRunsRequest(limit=wanted))
    page = answer.runs[offset : offset + limit]
    more = len(answer.runs) == wanted
    return RunPage(runs=[Run(**_fields(run)) for run in page], next=offset + limit if more else None)


@router.post(
    "/runs",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": Submission.model_json_schema()},
                "application/yaml": {"schema": {"type": "string", "description": "The recipe."}},
            },
        }
    },
)
async def submit(
    request: Request, peers: ThePeers, override: Annotated[list[str] | None, Query(max_length=1000)] = None
) -> Run:
    """Submit a recipe: JSON with `recipe` and `overrides`, or the YAML itself with `?override=KEY=VALUE`.

    Files that it names are files of the machine that trains.
    """
    asked = await _submission(request, override or [])
    loaded = from_foreign(asked.recipe, "recipe", asked.overrides)
    refuse_not_built(loaded.recipe)
    message = runs_pb2.SubmitRequest(
        run=asked.run, recipe_json=to_json(loaded.recipe), origins_json=json.dumps(loaded.origins)
    )
    return Run(**_fields(await peers.runs.Submit(message)))


@router.get("/runs/{run}")
async def get_run(run: RunId, peers: ThePeers) -> RunDetail:
    """One run and its summary."""
    found = await peers.runs.Get(runs_pb2.GetRunRequest(run=run))
    return RunDetail(**_fields(found), summary=json.loads(found.summary_json or "{}"))


@router.post("/runs/{run}/pause")
async def pause(run: RunId, peers: ThePeers) -> Run:
    """Stop dispatch at once and the loop before its next step."""
    return Run(**_fields(await peers.runs.Pause(runs_pb2.PauseRunRequest(run=run))))


@router.post("/runs/{run}/resume")
async def resume(run: RunId, peers: ThePeers) -> Run:
    """Go on after a pause."""
    return Run(**_fields(await peers.runs.Resume(runs_pb2.ResumeRunRequest(run=run))))


@router.post("/runs/{run}/cancel")
async def cancel(run: RunId, peers: ThePeers, reason: Reason | None = None) -> Run:
    """End a run; its open groups are dropped and counted."""
    why = reason.reason if reason is not None else ""
    return Run(**_fields(await peers.runs.Cancel(runs_pb2.CancelRunRequest(run=run, reason=why))))


@router.get("/runs/{run}/audit")
async def audit(run: RunId, peers: ThePeers) -> Audit:
    """Prove the books from the store."""
    found = await peers.runs.Audit(runs_pb2.AuditRequest(run=run))
    books = [
        BookAudit(book=book.book, groups=counts(book.groups), samples=counts(book.samples))
        for book in found.books
    ]
    imbalances = [f"{one.book}: {one.text}" for one in found.imbalances]
    return Audit(
        run=found.run, balanced=found.balanced, source=found.source, events=found.events,
        books=books, imbalances=imbalances,
    )  # fmt: skip


@router.get("/runs/{run}/steps")
async def steps(run: RunId, peers: ThePeers, from_step: FromStep = 0, limit: StepLimit = 100) -> StepPage:
    """Records of finished steps, oldest first."""
    found, following = await _steps(peers, run, from_step, limit)
    listed = [
        Step(
            step=record.step, incarnation=record.incarnation, metrics=numbers(record.metrics),
            seconds=numbers(record.seconds), groups=list(record.groups),
        )
        for record in found
    ]  # fmt: skip
    return StepPage(steps=listed, next=following)


@router.get("/runs/{run}/metrics")
async def metrics(
    run: RunId,
    peers: ThePeers,
    name: Annotated[list[str] | None, Query(max_length=200, description="Default: all.")] = None,
    from_step: FromStep = 0,
    limit: StepLimit = MOST_STEPS,
) -> Series:
    """Metrics of the finished steps as series, for curves."""
    found, following = await _steps(peers, run, from_step, limit)
    names = name or sorted({key for record in found for key in record.metrics})
    columns = {
        key: [finite(record.metrics[key]) if key in record.metrics else None for record in found]
        for key in names
    }
    return Series(steps=[record.step for record in found], metrics=columns, next=following)


def counts(found: Any) -> Counts:
    """BookCounts as JSON."""
    return Counts(
        dispatched=found.dispatched, trained=found.trained, open=found.open, dropped=dict(found.dropped)
    )


async def _steps(
    peers: Any, run: str, from_step: int, limit: int
) -> tuple[list[runs_pb2.StepRecord], int | None]:
    request = runs_pb2.ListStepsRequest(run=run, from_step=from_step, limit=limit)
    found = list((await peers.runs.ListSteps(request)).steps)
    return found, found[-1].step + 1 if len(found) == limit else None


async def _submission(request: Request, overrides: list[str]) -> Submission:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    try:
        if kind in YAML_TYPES:
            return Submission(recipe=body.decode(), overrides=overrides)
        found = Submission.model_validate_json(body)
    except ValueError as exc:  # pydantic's and unicode's errors are ValueErrors
        first = exc.errors()[0] if hasattr(exc, "errors") else {"msg": "not UTF-8", "loc": ("body",)}
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidInput(f"The submission is wrong: {first['msg']}", where=where) from exc
    return found.model_copy(update={"overrides": [*found.overrides, *overrides]})


def _fields(run: runs_pb2.Run) -> dict[str, Any]:
    return {
        "run": run.run, "name": run.name, "kind": run.kind, "phase": run.phase, "error": run.error,
        "status": word(runs_pb2.RunStatus, run.status, "RUN_STATUS_"),
        "completed_steps": run.completed_steps, "max_steps": run.max_steps,
        "created": seconds(run.created_ns), "started": seconds(run.started_ns),
        "ended": seconds(run.ended_ns),
    }  # fmt: skip
