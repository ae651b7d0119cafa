"""The weight-transfer calls of an engine: Pause, Begin, Load, Finish, Resume, Commit.

Invariants
- Calls come in one at a time (a lock); the order and the fencing are those of
  :mod:`rollout_svc.engine.versions`.
- Whatever fails after Begin leaves the engine paused and broken, and names the tensor if the receiver does;
  turns that an in-flight update has stopped are given up then, so that the router repeats them elsewhere.
- A bridge that dies between Pause and Commit keeps no turn for longer than ``hold_seconds``.
- A plan is sent once and remembered by its hash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.engine.core_types import PauseMode
from rollout_svc.engine.versions import Phase, Versions
from services.runtime.errors import Corrupt, HeadraceError, InvalidInput, NotReady, Unsupported
from services.runtime.logs import get_logger

if TYPE_CHECKING:
    from rollout_svc.engine.core import EngineCore

_MODES: dict[int, PauseMode] = {
    rollout_pb2.PAUSE_MODE_WAIT: "wait",
    rollout_pb2.PAUSE_MODE_KEEP: "keep",
    rollout_pb2.PAUSE_MODE_ABORT: "abort",
}
Plan = dict[str, dict[str, Any]]
WATCH_SECONDS = 0.5


class Updates:
    """Carries out the update calls on one engine; ``changed`` is told when the committed version changes."""

    def __init__(
        self,
        core: EngineCore,
        versions: Versions,
        transports: Sequence[str],
        changed: Callable[[], None],
        *,
        hold_seconds: float,
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
        self._hold_seconds = hold_seconds
        self._heard = time.monotonic()
        self._log = get_logger("engine")

    async def pause(self, request: rollout_pb2.PauseEngineRequest) -> None:
        """Stop scheduling; repeating it clears the caches again when asked to."""
        if request.mode not in _MODES:
            raise InvalidInput("Pause names no mode", where="mode")
        async with self._locked():
            mode = _MODES[request.mode]
            if mode == "keep":
                mode = self._carry()
            elif mode == "abort":
                self._versions.give_up()
            await self._core.pause(mode, clear_cache=request.clear_cache)
            self._versions.paused = True

    async def resume(self) -> None:
        """Schedule again; refused while the weights are not whole."""
        async with self._locked():
            self._versions.may_resume()
            await self._core.resume()
            self._versions.resumed()

    async def begin(self, request: rollout_pb2.BeginUpdateRequest) -> bool:
        """Enter an update; False when the plan is not known and has to be sent."""
        async with self._locked():
            self._check(request)
            if self._began == (request.generation, request.plan_hash):
                return True
            plan = self._known_plan(request)
            if plan is None:
                return False
            started = time.monotonic()
            self._versions.begin(request.generation, request.version)
            self._changed()
            await self._broken_on_error(
                self._core.start_update(request.generation, list(plan.values())), "BeginUpdate"
            )
            self._versions.phase = Phase.UPDATING
            self._plan, self._began = plan, (request.generation, request.plan_hash)
            self._seconds = {"begin": time.monotonic() - started}
            return True

    async def load(self, request: rollout_pb2.LoadWeightsRequest) -> int:
        """Load one chunk; the receiver checks each tensor's checksum as it reads."""
        async with self._locked():
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
        async with self._locked():
            self._versions.expect(generation)
            started = time.monotonic()
            reports = await self._broken_on_error(
                self._core.finish_update(self._versions.label), "FinishUpdate"
            )
            self._seconds["finish"] = time.monotonic() - started
            response = _merge(reports)
            response.seconds.update(self._seconds)
            if response.failures:
                await self._break()
            else:
                self._versions.phase = Phase.CLEAN
            self._began = (0, "")
            return response

    async def commit(self, request: rollout_pb2.CommitVersionRequest) -> None:
        """From here on turns carry this version."""
        async with self._locked():
            self._versions.commit(request.run, request.generation, request.version)
            self._changed()

    async def leave(self) -> None:
        """The process ends: turns that an update holds back go elsewhere now."""
        async with self._lock:
            if self._versions.carrying:
                await self._free_turns()

    async def watch(self) -> None:
        """Free what a bridge that says nothing more has stopped; runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self._hold_seconds))
            if self._versions.carrying and not self._lock.locked() and self._silent():
                async with self._locked():
                    await self._forsaken()

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > self._hold_seconds

    async def _forsaken(self) -> None:
        versions = self._versions
        self._log.warning("the update was left alone", after_s=self._hold_seconds, phase=versions.phase.value)
        if versions.committed is not None:
            # Paused, but nothing of an update has arrived: the weights are those that were committed.
            await self._core.resume()
            versions.resumed()
        else:
            await self._free_turns()

    def _carry(self) -> PauseMode:
        """vLLM's mode for an in-flight update."""
        if self._core.has_images:
            raise Unsupported(
                "In-flight updates are not supported for models with a vision encoder",
                where="in_flight_weight_updates",
                do="Set async_grpo.in_flight_weight_updates to false.",
            )
        self._versions.carry()
        # Without labels nobody could say which weights sampled a token of a request that goes on.
        return "keep" if self._core.labels_tokens else "abort"

    async def _break(self) -> None:
        self._versions.phase = Phase.BROKEN
        if self._versions.carrying:
            await self._free_turns()
        self._versions.give_up()

    async def _free_turns(self) -> None:
        """Give up every turn that is stopped or withheld; the engine stays paused."""
        self._versions.give_up()
        try:
            await self._core.pause("abort", clear_cache=False)
            self._versions.paused = True
        except HeadraceError as exc:
            # An engine that cannot even abort is dead or dying; its worker ends, and its turns with it.
            self._log.error("turns could not be given up", error=str(exc))

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        async with self._lock:
            try:
                yield
            finally:
                self._heard = time.monotonic()

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
            self._began = (0, "")
            self._log.error("update failed", where=where, error=str(exc))
            await self._break()
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
