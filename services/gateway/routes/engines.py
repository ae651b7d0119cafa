"""Engines: the roster with its versions, and the history of published versions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from protos.headrace.v1 import refit_pb2, rollout_pb2
from services.gateway.requests import RunId, ThePeers
from services.gateway.routes.trajectories import Version
from services.gateway.wire import finite, numbers, seconds, word
from services.runtime.errors import NotReady

router = APIRouter(tags=["engines"])
ROSTER_SECONDS = 5.0


class Engine(BaseModel):
    """One engine of the roster."""

    engine: str
    state: str = Field(description="joining, serving, updating, quarantined, lost or render_only")
    committed: Version | None
    reason: str
    book: str = Field(description="The book that it is set aside for; empty for training.")
    backend: str
    backend_version: str
    address: str
    run: str
    model: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int


class Roster(BaseModel):
    """All engines, and the version that is committed."""

    run: str
    committed: Version | None
    engines: list[Engine]


class Traffic(BaseModel):
    """What the router is doing."""

    run: str
    in_flight: int
    waiting: int
    turns: int
    sampled_tokens: int
    busy_s: float


class EngineRefit(BaseModel):
    """One engine's part in a publish."""

    engine: str
    committed: bool
    error: str
    probe_error: float | None = Field(description="Largest |log-probability difference| of the probe.")
    failures: list[str]
    seconds: dict[str, float | None]


class Refit(BaseModel):
    """One version of the ledger."""

    version: Version
    state: str = Field(description="staged, committed, failed or superseded")
    at: float | None
    nbytes: int
    plan_hash: str
    seconds: dict[str, float | None]
    engines: list[EngineRefit]


class RefitHistory(BaseModel):
    """Versions of a run as the bridge lists them."""

    versions: list[Refit]


@router.get("/engines")
async def engines(peers: ThePeers) -> Roster:
    """The roster now."""
    watch: Any = peers.refit.WatchRoster(refit_pb2.WatchRosterRequest(), timeout=ROSTER_SECONDS)
    async with watch as rosters:
        found = await anext(rosters, None)
    if found is None:
        raise NotReady("The bridge has no roster yet", where="refit", do="Try again shortly.")
    return Roster(
        run=found.run, committed=_version(found), engines=[_engine(entry) for entry in found.engines]
    )


@router.get("/rollout")
async def rollout(peers: ThePeers) -> Traffic:
    """Turns in flight, waiting and done in this run."""
    found = await peers.rollout.Status(rollout_pb2.RolloutStatusRequest())
    return Traffic(
        run=found.run, in_flight=found.in_flight, waiting=found.waiting, turns=found.turns,
        sampled_tokens=found.sampled_tokens, busy_s=found.busy_s,
    )  # fmt: skip


@router.get("/runs/{run}/versions")
async def versions(
    run: RunId, peers: ThePeers, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> RefitHistory:
    """Published versions: how large, how long each phase took, what the probe said."""
    found = await peers.refit.ListVersions(refit_pb2.ListVersionsRequest(run=run, limit=limit))
    return RefitHistory(versions=[_refit(record) for record in found.versions])


def _version(holder: Any) -> Version | None:
    """The optional field ``committed`` of a message."""
    return _shown(holder.committed) if holder.HasField("committed") else None


def _shown(found: Any) -> Version:
    return Version(incarnation=found.incarnation, number=found.number, digest=found.digest)


def _engine(entry: refit_pb2.RosterEntry) -> Engine:
    info = entry.info
    return Engine(
        engine=info.engine, state=word(refit_pb2.EngineState, entry.state, "ENGINE_STATE_"),
        committed=_version(entry), reason=entry.reason, book=entry.book, backend=info.name,
        backend_version=info.engine_version, address=info.address, run=info.run, model=info.model,
        device=info.device, dtype=info.dtype, max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
    )  # fmt: skip


def _refit(found: refit_pb2.VersionRecord) -> Refit:
    engines = [
        EngineRefit(
            engine=one.engine, committed=one.committed, error=one.error, probe_error=finite(one.probe_error),
            failures=[f"{check.name}: {check.detail}" for check in one.failures],
            seconds=numbers(one.seconds),
        )
        for one in found.engines
    ]  # fmt: skip
    return Refit(
        version=_shown(found.version), state=found.state, at=seconds(found.at_ns), nbytes=found.nbytes,
        plan_hash=found.plan_hash, seconds=numbers(found.seconds), engines=engines,
    )  # fmt: skip
