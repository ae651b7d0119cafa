"""The weight-transfer calls of an engine: Pause, Begin, Load, Finish, Resume, Commit.

Invariants
- Calls come in one at a time (a lock); the order and the fencing are those of
  :mod:`rollout_svc.engine.versions`.
- Whatever fails after Begin leaves the engine paused and broken, and names the tensor if the receiver does.
- A plan is sent once and remembered by its hash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.engine.versions import Phase, Versions
from services.runtime.errors import Corrupt, HeadraceError, InvalidInput, NotReady, Unsupported
from services.runtime.logs import get_logger

if TYPE_CHECKING:
    from rollout_svc.engine.core import EngineCore, PauseMode

_MODES: dict[int, PauseMode] = {
    rollout_pb2.PAUSE_MODE_WAIT: "wait",
    rollout_pb2.PAUSE_MODE_KEEP: "keep",
    rollout_pb2.PAUSE_MODE_ABORT: "abort",
}
Plan = dict[str, dict[str, Any]]


class Updates:
    """Carries out the update calls on one engine; ``changed`` is told when the committed version changes."""

    def __init__(
        self, core: EngineCore, versions: Versions, transports: Sequence[str], changed: Callable[[], None]
    ) -> None:
        self._core = core
        self._versions = versions
        self._transports = transports
        self._changed = changed
        self._lock = asyncio.Lock()
        self._plans: dict[str, Plan] = {}
        self._plan: Plan = {}
        self._began = (0, "")
        self._seconds: dict[str, float] = {}
        self._log = get_logger("engine")

    async def pause(self, request: rollout_pb2.PauseEngineRequest) -> None:
        """Stop scheduling; repeating it clears the caches again when asked to."""
        if request.mode not in _MODES:
            raise InvalidInput("Pause names no mode", where="mode")
        async with self._lock:
            await self._core.pause(_MODES[request.mode], clear_cache=request.clear_cache)
            self._versions.paused = True

    async def resume(self) -> None:
        """Schedule again; refused while the weights are not whole."""
        async with self._lock:
            self._versions.may_resume()
            await self._core.resume()
            self._versions.paused = False

    async def begin(self, request: rollout_pb2.BeginUpdateRequest) -> bool:
        """Enter an update; False when the plan is not known and has to be sent."""
        async with self._lock:
            self._check(request)
            if self._began == (request.generation, request.plan_hash):
                return True
            plan = self._known_plan(request)
            if plan is None:
                return False
            started = time.monotonic()
            self._versions.begin(request.generation, request.version)
            self._changed()
            await self._core.start_update(request.generation, list(plan.values()))
            self._versions.phase = Phase.UPDATING
            self._plan, self._began = plan, (request.generation, request.plan_hash)
            self._seconds = {"begin": time.monotonic() - started}
            return True

    async def load(self, request: rollout_pb2.LoadWeightsRequest) -> int:
        """Load one chunk; the receiver checks each tensor's checksum as it reads."""
        async with self._lock:
            self._versions.expect(request.generation)
            started = time.monotonic()
            info = {
                "generation": request.generation,
                "shm_name": request.shm_name,
                "slices": [self._slice(item) for item in request.slices],
            }
            await self._broken_on_error(self._core.update(info), "LoadWeights")
            self._seconds["load"] = self._seconds.get("load", 0.0) + time.monotonic() - started
            return len(request.slices)

    async def finish(self, generation: int) -> rollout_pb2.FinishUpdateResponse:
        """Leave the update and ask each worker what became of every tensor."""
        async with self._lock:
            self._versions.expect(generation)
            started = time.monotonic()
            reports = await self._broken_on_error(self._core.finish_update(), "FinishUpdate")
            self._seconds["finish"] = time.monotonic() - started
            response = _merge(reports)
            response.seconds.update(self._seconds)
            failed = bool(response.failures)
            self._versions.phase = Phase.BROKEN if failed else Phase.CLEAN
            self._began = (0, "")
            return response

    async def commit(self, request: rollout_pb2.CommitVersionRequest) -> None:
        """From here on turns carry this version."""
        async with self._lock:
            self._versions.commit(request.run, request.generation, request.version)
            self._changed()

    def _check(self, request: rollout_pb2.BeginUpdateRequest) -> None:
        if request.run != self._versions.run:
            raise NotReady(f"The engine serves run {self._versions.run}", reason="OTHER_RUN")
        if request.transport not in self._transports:
            raise Unsupported(
                f"This engine takes {', '.join(self._transports)}, not {request.transport!r}",
                where="transport",
            )
        self._versions.fence(request.generation)

    def _known_plan(self, request: rollout_pb2.BeginUpdateRequest) -> Plan | None:
        if request.plan:
            # One run has one plan; a second hash means that the first will not be used again.
            self._plans = {request.plan_hash: {spec.name: _spec(spec) for spec in request.plan}}
        return self._plans.get(request.plan_hash)

    def _slice(self, item: rollout_pb2.TensorSlice) -> dict[str, Any]:
        if item.name not in self._plan:
            raise InvalidInput(f"{item.name} is not in the plan", where="slices")
        return {
            **self._plan[item.name],
            "offset": item.offset,
            "nbytes": item.nbytes,
            "checksum": item.checksum,
        }

    async def _broken_on_error(self, work: Any, where: str) -> Any:
        try:
            return await work
        except BaseException as exc:
            self._versions.phase = Phase.BROKEN
            self._began = (0, "")
            self._log.error("update failed", where=where, error=str(exc))
            if isinstance(exc, HeadraceError) and not isinstance(exc, NotReady):
                raise Corrupt(exc.message, where=where, do="Publish again.", reason="UPDATE_FAILED") from exc
            raise


def _spec(spec: rollout_pb2.TensorSpec) -> dict[str, Any]:
    dtype = types_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_").lower()
    return {"name": spec.name, "dtype": dtype, "shape": list(spec.shape)}


def _merge(reports: Sequence[dict[str, Any]]) -> rollout_pb2.FinishUpdateResponse:
    """One report of all workers; each worker checks its own part of every tensor."""
    response = rollout_pb2.FinishUpdateResponse()
    response.checked = max((int(report["checked"]) for report in reports), default=0)
    for rank, report in enumerate(reports):
        where = f"worker {rank}: " if len(reports) > 1 else ""
        for failure in report["failures"]:
            detail = f"{where}{failure['detail']}"
            response.failures.append(rollout_pb2.TensorCheck(name=failure["name"], ok=False, detail=detail))
    return response
