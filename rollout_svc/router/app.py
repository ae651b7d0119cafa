"""The router's gRPC service.

Invariants
- A turn is a function of (run seed, key, turn, version): when an engine fails under it, it is repeated on
  another one, or on the same when that is back, until the caller's deadline.
- Only failures of the *engine* are repeated; what says that the *request* is wrong goes back at once.
- Between Pause and Resume no turn is sent to the paused engines; turns that arrive meanwhile wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import grpc.aio

from protos.headrace.v1 import refit_pb2, rollout_pb2, rollout_pb2_grpc
from rollout_svc.router.busy import BusyClock
from rollout_svc.router.engine import RoutedEngine
from rollout_svc.router.fleet import Fleet
from rollout_svc.router.roster import RosterWatch
from rollout_svc.router.setups import Setups
from rollout_svc.settings import RouterSettings
from services.runtime import metrics, tracing
from services.runtime.errors import InvalidInput, NotReady
from services.runtime.ids import bind_ids
from services.runtime.logs import get_logger
from services.runtime.service import ServiceApp

ROLLOUT_SERVICE = "headrace.v1.Rollout"
TURN_SECONDS = 300.0
OTHER_SECONDS = 60.0
MARGIN_SECONDS = 0.1
"""Kept back from the caller's deadline, so that it hears why and not only that time ran out."""


class Router(ServiceApp, rollout_pb2_grpc.RolloutServicer):
    """Serves Rollout."""

    name: ClassVar[str] = "rollout"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._fleet = Fleet(affinity_samples=settings.affinity_samples)
        self._setups = Setups()
        self._watch: RosterWatch | None = None
        self._turns = 0
        self._tokens = 0
        self._busy = BusyClock()
        self._log = get_logger("rollout")

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Serve Rollout."""
        rollout_pb2_grpc.add_RolloutServicer_to_server(self, server)
        return (ROLLOUT_SERVICE,)

    async def start(self) -> None:
        """Follow the roster."""
        self._watch = RosterWatch(self._settings.refit, self.take_roster)
        self._watch.start()

    async def stop(self) -> None:
        """Leave the engines alone."""
        if self._watch is not None:
            await self._watch.stop()
        await self._setups.stop()
        await self._fleet.close()

    def take_roster(self, roster: refit_pb2.Roster) -> None:
        """A new roster has arrived."""
        self._fleet.update(roster.engines)
        self._setups.apply(self._fleet.engines)

    async def Setup(
        self, request: rollout_pb2.RolloutSetupRequest, context: Any
    ) -> rollout_pb2.RolloutSetupResponse:
        """Take the run; returns when the engines that are there are set up for it."""
        if not request.run:
            raise InvalidInput("Setup names no run", where="run")
        if request.run != self._setups.run:
            self._turns = self._tokens = 0
            self._busy.restart()
            self._fleet.open_gates(())
        self._setups.set(
            rollout_pb2.EngineSetupRequest(
                run=request.run, policy_json=request.policy_json, seed=request.seed
            )
        )
        await self._setups.settled()
        return rollout_pb2.RolloutSetupResponse()

    async def Turn(self, request: rollout_pb2.TurnRequest, context: Any) -> rollout_pb2.TurnResponse:
        """One turn, on whichever engine can take it."""
        key = request.key
        self._check_run(key.run)
        bind_ids(run=key.run, group=str(key.group), sample=key.sample)
        sample = (key.book, key.group, key.sample)
        deadline = _deadline(context, TURN_SECONDS)
        # Here too: while no engine answers, turns arrive and none ends.
        self._measure_load()
        with tracing.span("rollout.turn", turn=request.turn) as span:
            response, engine = await self._turn(request, sample, deadline)
            span.set_attribute("engine", engine.id)
        self._turns += 1
        self._tokens += len(response.sampled_ids) // 4
        self._measure(engine.id, len(response.sampled_ids) // 4)
        return response

    def _measure(self, engine: str, tokens: int) -> None:
        metrics.rollout_turns.add(1, {"engine": engine})
        metrics.rollout_tokens.add(tokens, {"engine": engine})
        self._measure_load()

    def _measure_load(self) -> None:
        metrics.rollout_in_flight.set(self._in_flight())
        metrics.rollout_waiting.set(self._fleet.waiting)

    async def _turn(
        self, request: rollout_pb2.TurnRequest, sample: object, deadline: float
    ) -> tuple[rollout_pb2.TurnResponse, RoutedEngine]:
        loop = asyncio.get_running_loop()
        run = request.key.run
        while True:
            engine = await self._fleet.wait_for(
                lambda: self._fleet.pick(run, sample, request.key.book), deadline, lambda: self._why(run)
            )
            try:
                with engine.flight(), self._busy.turn():
                    response = await engine.call("Turn", request, max(0.001, deadline - loop.time()))
                return response, engine
            except NotReady as exc:
                engine.avoid()
                metrics.rollout_repeats.add(1)
                self._log.warning("turn is repeated", engine=engine.id, error=str(exc))
                self._check_run(run)

    async def Render(self, request: rollout_pb2.RenderRequest, context: Any) -> rollout_pb2.RenderResponse:
        """Forwarded to any engine that was set up, serving or not."""
        self._check_run(request.run)
        rendered: rollout_pb2.RenderResponse
        rendered = await self._forward("Render", request, context, lambda engine: engine.renders(request.run))
        return rendered

    async def Score(
        self, request: rollout_pb2.ScoreTokensRequest, context: Any
    ) -> rollout_pb2.ScoreTokensResponse:
        """Forwarded to the named engine, else to one that serves."""
        self._check_run(request.run)

        def can(engine: RoutedEngine) -> bool:
            if request.engine:
                return engine.id == request.engine and engine.renders(request.run)
            return engine.open and engine.serves(request.run) and not engine.entry.book

        scored: rollout_pb2.ScoreTokensResponse = await self._forward("Score", request, context, can)
        return scored

    async def Pause(self, request: rollout_pb2.GateRequest, context: Any) -> rollout_pb2.GateResponse:
        """Close gates and wait for what is in flight, at most ``drain_timeout_s`` (0: not at all)."""
        self._check_run(request.run)
        engines = self._fleet.close_gates(request.engines)
        if request.drain_timeout_s <= 0:
            return rollout_pb2.GateResponse(in_flight=sum(engine.in_flight for engine in engines))
        left = await asyncio.gather(*(engine.drained(request.drain_timeout_s) for engine in engines))
        return rollout_pb2.GateResponse(in_flight=sum(left))

    async def Resume(self, request: rollout_pb2.GateRequest, context: Any) -> rollout_pb2.GateResponse:
        """Open gates."""
        self._check_run(request.run)
        self._fleet.open_gates(request.engines)
        return rollout_pb2.GateResponse(in_flight=self._in_flight())

    async def Status(self, request: Any, context: Any) -> rollout_pb2.RolloutStatusResponse:
        """Counters of the present run."""
        return rollout_pb2.RolloutStatusResponse(
            run=self._setups.run,
            in_flight=self._in_flight(),
            waiting=self._fleet.waiting,
            turns=self._turns,
            sampled_tokens=self._tokens,
            engines=sorted(self._fleet.engines),
            busy_s=self._busy.seconds,
        )

    async def _forward(self, method: str, request: Any, context: Any, can: Any) -> Any:
        deadline = _deadline(context, OTHER_SECONDS)
        loop = asyncio.get_running_loop()

        def pick() -> RoutedEngine | None:
            able = [engine for engine in self._fleet.engines.values() if can(engine)]
            return min(able, key=lambda engine: engine.in_flight, default=None)

        while True:
            engine = await self._fleet.wait_for(pick, deadline, lambda: self._why(request.run))
            try:
                return await engine.call(method, request, max(0.001, deadline - loop.time()))
            except NotReady as exc:
                engine.avoid()
                self._log.warning("call is repeated", method=method, engine=engine.id, error=str(exc))

    def _check_run(self, run: str) -> None:
        if not self._setups.run:
            raise NotReady("The router has no run", where="rollout", do="Call its Setup.", reason="NO_RUN")
        if run != self._setups.run:
            raise NotReady(
                f"The router serves run {self._setups.run}, not {run}", where="rollout", reason="NO_RUN"
            )

    def _why(self, run: str) -> str:
        if self._setups.refused is not None:
            return str(self._setups.refused)
        return self._fleet.describe(run)

    def _in_flight(self) -> int:
        return sum(engine.in_flight for engine in self._fleet.engines.values())


def _deadline(context: Any, fallback: float) -> float:
    left = context.time_remaining()
    seconds = fallback if left is None else left
    return asyncio.get_running_loop().time() + max(0.0, seconds - MARGIN_SECONDS)
