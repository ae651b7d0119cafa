"""What each command does. Runs on the main thread; the only place where gRPC requests meet torch.

Invariants
- Commands of another run, or before Setup, are refused; so is anything from an older epoch.
- An error after weights were changed, but before the step was complete, ends the process: its weights belong
  to no step. The supervisor starts it again and Setup restores the newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from opentelemetry.context import Context

from protos.headrace.v1 import buffer_pb2, rollout_pb2, trainer_pb2
from services.runtime import tracing
from services.runtime.errors import HeadraceError, Internal, NotReady, Refused
from services.runtime.ids import bind_ids
from services.runtime.logs import get_logger
from trainer_svc.commands import Snapshot
from trainer_svc.data.rows import build_rows
from trainer_svc.session import Session
from trainer_svc.steps import Decision, decide

Fetch = Callable[[buffer_pb2.Manifest], list[buffer_pb2.TrajectoryGroup]]
_log = get_logger("trainer")


class Trainer:
    """The commands of the Trainer service over at most one session."""

    def __init__(
        self,
        snapshot: Snapshot,
        device: torch.device,
        fetch: Fetch,
        on_torn: Callable[[HeadraceError], None],
    ) -> None:
        """``fetch`` gets a manifest's groups; ``on_torn`` ends the process (see above)."""
        self._snapshot = snapshot
        self._device = device
        self._fetch = fetch
        self._on_torn = on_torn
        self._session: Session | None = None
        self._publish()

    def setup(self, request: trainer_pb2.TrainerSetupRequest) -> trainer_pb2.TrainerState:
        """Load the run; a repeat of the same Setup keeps what is in memory."""
        former = self._session
        if former is not None and former.run == request.run:
            former.fence.admit(request.fence, "Setup")
            if _same(former.request, request):
                return self._state()
        if former is not None:
            former.close()
            self._session = None
            self._publish()
        with bind_ids(run=request.run):
            self._session = Session(request, self._device)
            _log.info("set up", completed_steps=self._session.completed_steps, device=str(self._device))
        self._publish()
        return self._state()

    def step(self, request: trainer_pb2.StepRequest) -> trainer_pb2.StepResponse:
        """Train the step of the fence, or return its stored result."""
        session = self._current(request.run)
        session.fence.admit(request.fence, "Step")
        if decide(request.fence.step, session.completed_steps) is Decision.REPEAT:
            return _repeat(session, request.fence.step)
        with bind_ids(run=request.run):
            try:
                return self._train(session, request)
            except Exception as exc:
                if session.learner.touched:
                    self._torn(exc)
                raise
            finally:
                self._publish()

    def save(self, request: trainer_pb2.SaveRequest) -> trainer_pb2.SaveResponse:
        """Write a checkpoint."""
        session = self._current(request.run)
        session.fence.admit(request.fence, "Save")
        with bind_ids(run=request.run), tracing.span("train.save"):
            response = session.save(request.run_state_json, dict(request.metrics))
        self._publish()
        return response

    def export(self, request: trainer_pb2.ExportRequest) -> trainer_pb2.ExportResponse:
        """Write a Hugging Face directory."""
        return self._current(request.run).export(request.path)

    def stage(self, request: trainer_pb2.StageWeightsRequest) -> trainer_pb2.StageWeightsResponse:
        """Stage the current weights."""
        session = self._current(request.run)
        session.fence.admit(request.fence, "StageWeights")
        with bind_ids(run=request.run), tracing.span("train.stage"):
            return session.stage(request)

    def release(self, request: trainer_pb2.ReleaseWeightsRequest) -> trainer_pb2.ReleaseWeightsResponse:
        """Give a staged version back; fine when it is gone."""
        session = self._session
        if session is not None and session.run == request.run:
            session.sender.release(request.version.incarnation, request.version.number)
        return trainer_pb2.ReleaseWeightsResponse()

    def score(self, request: rollout_pb2.ScoreTokensRequest) -> rollout_pb2.ScoreTokensResponse:
        """Score sequences for the probe."""
        session = self._current(request.run)
        sequences = [
            torch.from_numpy(np.frombuffer(each, dtype="<i4").astype(np.int64)) for each in request.sequences
        ]
        found = session.score(sequences, request.temperature)
        return rollout_pb2.ScoreTokensResponse(
            logprobs=[each.numpy().astype("<f4").tobytes() for each in found]
        )

    def close(self) -> None:
        """Give everything back; the process ends."""
        if self._session is not None:
            self._session.close()

    def _train(self, session: Session, request: trainer_pb2.StepRequest) -> trainer_pb2.StepResponse:
        manifest = request.manifest
        _check_manifest(request)
        started = time.monotonic()
        links = [
            tracing.link_from(sample.trace.traceparent)
            for group in manifest.groups
            for sample in group.samples
        ]
        # An empty parent: the step is a trace of its own, linked to each sample's.
        with tracing.span("train.step", links=links, parent=Context(), step=request.fence.step):
            with tracing.span("train.fetch"):
                groups = self._fetch(manifest)
            fetched = time.monotonic() - started
            limit = session.config.batch.max_length
            rows = build_rows(manifest, groups, kind=session.config.kind, max_length=limit)
            response = session.train(request.fence.step, rows)
        response.seconds["fetch"] = fetched
        response.seconds["total"] = time.monotonic() - started
        return response

    def _current(self, run: str) -> Session:
        if self._session is None:
            raise NotReady("No run is set up", where="trainer", do="Call Setup first.", reason="NO_RUN")
        if self._session.run != run:
            raise Refused(
                f"The trainer works for run {self._session.run}, not {run}",
                where="trainer",
                reason="OTHER_RUN",
            )
        return self._session

    def _torn(self, exc: Exception) -> None:
        error = Internal(
            f"A step broke off after weights had changed: {exc}",
            where="Trainer.Step",
            do="The trainer restarts; set it up again to continue from the newest checkpoint.",
            reason="TORN_STEP",
        )
        _log.error("torn step", error=str(error))
        self._session = None
        self._on_torn(error)

    def _state(self) -> trainer_pb2.TrainerState:
        if self._session is None:
            return trainer_pb2.TrainerState(process=self._snapshot.process, device=str(self._device))
        return self._session.state(self._snapshot.process)

    def _publish(self) -> None:
        self._snapshot.publish(self._state())


def _repeat(session: Session, step: int) -> trainer_pb2.StepResponse:
    stored = session.last_result
    if stored is None or stored.step != step:
        raise Refused(f"The result of step {step} is not kept", where="Trainer.Step", reason="NO_RESULT")
    response = trainer_pb2.StepResponse()
    response.CopyFrom(stored)
    response.repeated = True
    return response


def _check_manifest(request: trainer_pb2.StepRequest) -> None:
    manifest = request.manifest
    if manifest.run != request.run or manifest.step != request.fence.step:
        raise Refused(
            f"The manifest is of run {manifest.run}, step {manifest.step}; the command of run {request.run}, "
            f"step {request.fence.step}",
            where="Trainer.Step",
            reason="WRONG_MANIFEST",
        )


def _same(former: trainer_pb2.TrainerSetupRequest, request: trainer_pb2.TrainerSetupRequest) -> bool:
    """Whether two Setups ask for the same, fences aside."""
    keys = ("kind", "recipe_json", "checkpoint_dir", "seed")
    return all(getattr(former, key) == getattr(request, key) for key in keys)
