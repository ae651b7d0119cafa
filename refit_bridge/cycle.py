"""One engine's way to a version: drain, pause, transfer, resume, probe; then commit.

Invariants
- Every wait is bounded. Calls of one update carry one generation, which is never used again.
- After the first byte an engine that fails is never resumed; what failed before the first byte is told apart
  (``touched``), since that engine still holds whole weights: it goes on with them.
- Turns that an in-flight update has stopped are given up as soon as the update has failed.
- The probe runs with our gate closed and vLLM's open: a paused engine would queue it for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.headrace.v1 import refit_pb2, rollout_pb2, rollout_pb2_grpc, trainer_pb2, types_pb2
from refit_bridge import probe
from refit_bridge.phases import Phases
from refit_bridge.probe import Logprobs
from refit_bridge.settings import RefitSettings
from services.runtime import rpc
from services.runtime.errors import Corrupt, HeadraceError, NotFound, NotReady, Refused
from services.runtime.logs import get_logger

SHORT_SECONDS = 10.0
UNDO_SECONDS = 5.0
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What both sides score, and how much they may differ."""

    sequences: tuple[bytes, ...]
    temperature: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Way:
    """What becomes of turns in flight: waited for (drained), carried over, or given up."""

    mode: rollout_pb2.PauseMode.ValueType
    clear_cache: bool = True

    @property
    def waits(self) -> bool:
        """Whether the gate has to drain first."""
        return self.mode == rollout_pb2.PAUSE_MODE_WAIT


DRAINED = Way(rollout_pb2.PAUSE_MODE_WAIT)


@dataclass
class Target:
    """What engines are brought to, and how.

    ``staged`` is None for the base model; ``expected`` gives the trainer's answer to the probe.
    """

    run: str
    version: types_pb2.PolicyVersion
    transport: str
    staged: trainer_pb2.StageWeightsResponse | None
    expected: Callable[[], Awaitable[Logprobs]]
    probe: ProbeSettings
    way: Way = DRAINED


@dataclass
class Outcome:
    """How one engine fared. ``error`` is None when it holds the version and answers rightly.

    ``carried``: turns that were in flight and not waited for.
    """

    engine: str
    generation: int = 0
    error: HeadraceError | None = None
    touched: bool = False
    paused: bool = False
    carried: int = 0
    probe_error: float = 0.0
    failures: list[rollout_pb2.TensorCheck] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    committed: bool = False

    def to_proto(self) -> refit_pb2.EngineRefit:
        """The contract's message."""
        return refit_pb2.EngineRefit(
            engine=self.engine,
            committed=self.committed,
            error="" if self.error is None else str(self.error),
            probe_error=self.probe_error,
            failures=self.failures,
            seconds=self.phases.seconds,
        )


class EngineCycle:
    """Drives one engine. ``gate`` is the router's side of it."""

    def __init__(self, engine: str, address: str, gate: Gate, settings: RefitSettings) -> None:
        self.engine = engine
        self._gate = gate
        self._settings = settings
        self._stub: rollout_pb2_grpc.EngineAsyncStub = rpc.stub(
            rollout_pb2_grpc.EngineStub, address, name=f"engine {engine}"
        )

    async def bring(self, target: Target, next_generation: Callable[[], Awaitable[int]]) -> Outcome:
        """Bring the engine to ``target``, up to the probe; never raises for a fault of the engine."""
        outcome = Outcome(self.engine)
        try:
            outcome.generation = await next_generation()
            with outcome.phases.phase("drain"):
                outcome.carried = await self._gate.close(self.engine, drain=target.way.waits)
            if target.staged is not None:
                await self._update(target, target.staged, outcome)
            with outcome.phases.phase("probe"):
                await self._probe(target, outcome)
        except HeadraceError as exc:
            outcome.error = exc
            await self._undo(target, outcome)
        return outcome

    async def abandon(self, way: Way) -> None:
        """The update came to nothing: free the turns that it stopped. Never raises."""
        if way.waits:
            return
        try:
            # Nobody may be scheduled again by this: it only ends what stands still or is withheld.
            await self._stub.Pause(
                rollout_pb2.PauseEngineRequest(mode=rollout_pb2.PAUSE_MODE_ABORT), timeout=UNDO_SECONDS
            )
        except HeadraceError as exc:
            # The engine frees them itself when it hears nothing more.
            get_logger("refit").warning("turns were not freed", engine=self.engine, error=str(exc))

    async def _undo(self, target: Target, outcome: Outcome) -> None:
        """Leave nobody waiting for an update that has failed."""
        if outcome.touched:
            await self.abandon(target.way)
            return
        try:
            if outcome.paused:
                await self._stub.Resume(rollout_pb2.ResumeEngineRequest(), timeout=UNDO_SECONDS)
            await self._gate.open(self.engine)
        except HeadraceError as exc:
            get_logger("refit").warning("engine was not resumed", engine=self.engine, error=str(exc))

    async def commit(self, target: Target, outcome: Outcome) -> None:
        """Let the engine stamp tokens with the version, and open the gate; raises on failure."""
        request = rollout_pb2.CommitVersionRequest(
            run=target.run, generation=outcome.generation, version=target.version
        )
        with outcome.phases.phase("commit"):
            await self._stub.CommitVersion(request, timeout=SHORT_SECONDS)
        outcome.committed = True

    async def _update(
        self, target: Target, staged: trainer_pb2.StageWeightsResponse, outcome: Outcome
    ) -> None:
        phase = outcome.phases.phase
        with phase("pause"):
            outcome.paused = True
            await self._stub.Pause(
                rollout_pb2.PauseEngineRequest(mode=target.way.mode, clear_cache=target.way.clear_cache)
            )
        with phase("begin"):
            # From here on nobody knows what the engine holds, even if the answer is lost.
            outcome.touched = True
            await self._begin(target, staged, outcome.generation)
        with phase("load"):
            for chunk in staged.chunks:
                await self._load(staged.shm_name, chunk.slices, outcome.generation)
        with phase("finish"):
            done = await self._stub.FinishUpdate(
                rollout_pb2.FinishUpdateRequest(generation=outcome.generation)
            )
            outcome.failures = list(done.failures)
            _refuse_failures(self.engine, outcome.failures)
        with phase("resume"):
            await self._stub.Resume(rollout_pb2.ResumeEngineRequest())

    async def _begin(self, target: Target, staged: trainer_pb2.StageWeightsResponse, generation: int) -> None:
        request = rollout_pb2.BeginUpdateRequest(
            run=target.run, generation=generation, version=target.version,
            transport=target.transport, plan_hash=staged.plan_hash,
        )  # fmt: skip
        answer = await self._stub.BeginUpdate(request)
        if not answer.plan_known:
            request.plan.extend(staged.plan)
            answer = await self._stub.BeginUpdate(request)
        if not answer.plan_known:
            raise Corrupt(f"Engine {self.engine} does not take the plan {staged.plan_hash[:12]}")

    async def _load(self, shm_name: str, slices: Sequence[rollout_pb2.TensorSlice], generation: int) -> None:
        request = rollout_pb2.LoadWeightsRequest(generation=generation, shm_name=shm_name, slices=slices)
        answer = await self._stub.LoadWeights(request, timeout=self._settings.load_seconds)
        if answer.loaded != len(slices):
            raise Corrupt(f"Engine {self.engine} loaded {answer.loaded} of {len(slices)} tensors")

    async def _probe(self, target: Target, outcome: Outcome) -> None:
        settings = target.probe
        if not settings.sequences:
            return
        question = probe.request(target.run, settings.sequences, settings.temperature, self.engine)
        expected = await target.expected()
        answer = await self._stub.Score(question)
        mine = probe.read(answer, settings.sequences, where=f"engine {self.engine}")
        found = probe.compare(mine, expected, settings.tolerance)
        outcome.probe_error = found.error
        if not found.ok:
            raise Refused(
                f"The probe disagrees on {self.engine}: {found}; "
                "every tensor of the plan answered as its source",
                where=f"tolerance {settings.tolerance:g}",
                do="Compare precision and model settings of trainer and engine.",
                reason="PROBE_DISAGREES",
            )


class Gate(Protocol):
    """The router's gate in front of Turn."""

    async def close(self, engine: str, *, drain: bool) -> int:
        """Let nothing more in; the turns that are in flight.

        With ``drain`` wait until there is none; raises NotReady when it does not get empty.
        """
        ...

    async def open(self, engine: str) -> None:
        """Let turns in."""
        ...


class RouterGate:
    """The gate of the rollout router."""

    def __init__(self, address: str, drain_seconds: float) -> None:
        self._stub: rollout_pb2_grpc.RolloutAsyncStub = rpc.stub(
            rollout_pb2_grpc.RolloutStub, address, name="rollout"
        )
        self._drain_seconds = drain_seconds
        self.run = ""

    async def close(self, engine: str, *, drain: bool) -> int:
        """See :class:`Gate`."""
        seconds = self._drain_seconds if drain else 0.0
        request = rollout_pb2.GateRequest(run=self.run, engines=[engine], drain_timeout_s=seconds)
        try:
            answer = await self._stub.Pause(request, timeout=seconds + SHORT_SECONDS)
        except NotFound:
            return 0  # The router does not know the engine yet, hence nothing is in flight there.
        if answer.in_flight and drain:
            raise NotReady(
                f"{answer.in_flight} turns are still in flight after {self._drain_seconds:.0f} s",
                where=f"engine {engine}",
                reason="NOT_DRAINED",
            )
        return answer.in_flight

    async def open(self, engine: str) -> None:
        """See :class:`Gate`."""
        try:
            await self._stub.Resume(
                rollout_pb2.GateRequest(run=self.run, engines=[engine]), timeout=SHORT_SECONDS
            )
        except NotFound:
            return  # A router that meets the engine later starts with an open gate.


def _refuse_failures(engine: str, failures: Sequence[rollout_pb2.TensorCheck]) -> None:
    if not failures:
        return
    named = "; ".join(f"{check.name}: {check.detail}" for check in failures[:_MAX_NAMED])
    more = f" and {len(failures) - _MAX_NAMED} more" if len(failures) > _MAX_NAMED else ""
    raise Refused(
        f"Tensors do not answer as their source on {engine}: {named}{more}",
        where=f"engine {engine}",
        do="The engine stays quarantined until a complete update succeeds.",
        reason="TENSORS_WRONG",
    )
