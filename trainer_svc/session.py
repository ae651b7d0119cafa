"""One run inside the trainer: its learner, its checkpoints, its staged weights. Main thread only.

Invariants
- ``completed_steps`` rises by one when a step's update is wholly in the weights, and never otherwise.
- The newest complete and undamaged checkpoint is where a run begins; a damaged one is passed over, loudly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from google.protobuf import json_format

from protos.headrace.v1 import trainer_pb2
from refit_bridge.sender import HuggingFaceSource, ShmSender
from services.runtime import metrics as telemetry
from services.runtime.errors import Corrupt, InvalidInput, Refused, Unsupported
from services.runtime.logs import get_logger
from trainer_svc.checkpoint import contents
from trainer_svc.checkpoint.directory import replace_directory
from trainer_svc.checkpoint.retention import steps_to_keep
from trainer_svc.checkpoint.store import Checkpoint, CheckpointStore
from trainer_svc.config import TrainerConfig, load_config
from trainer_svc.data.rows import StepRows
from trainer_svc.learner import Learner
from trainer_svc.models.load import check_model, source_dtype, wire_dtype, write_network
from trainer_svc.models.wire import WireScorer
from trainer_svc.steps import EpochFence
from trainer_svc.versions import Version

_log = get_logger("trainer")


class Session:
    """A run that was set up."""

    def __init__(self, request: trainer_pb2.TrainerSetupRequest, device: torch.device) -> None:
        self.request = request
        self.run = request.run
        self.fence = EpochFence(request.fence.epoch)
        self.config: TrainerConfig = load_config(request.recipe_json)
        if request.kind and request.kind != self.config.kind:
            raise InvalidInput(f"kind {request.kind} is not the recipe's {self.config.kind}", where="Setup")
        check_model(self.config.model.model_name)
        torch.manual_seed(request.seed & 0x7FFFFFFFFFFFFFFF)
        self.store = CheckpointStore(Path(request.checkpoint_dir)) if request.checkpoint_dir else None
        self.completed_steps = 0
        self.checkpointed_steps: int | None = None
        self.last_result: trainer_pb2.StepResponse | None = None
        self._incarnation = 0
        self.learner = self._load(device)
        self.sender = ShmSender(self.run)
        self._scorer = WireScorer(self.learner.policy, wire_dtype(self.config.model.wire_dtype))

    def close(self) -> None:
        """Give staged memory back."""
        self.sender.close()

    def train(self, step: int, rows: StepRows) -> trainer_pb2.StepResponse:
        """Train step ``step`` on ``rows`` and store the result."""
        before = self.learner.optimizer_steps
        metrics = self.learner.train(rows, Version(self._incarnation, self.completed_steps))
        self._scorer.weights_changed()
        telemetry.record_all(telemetry.trainer_seconds, self.learner.seconds, "phase")
        self.completed_steps = step + 1
        metrics["optimizer_steps"] = float(self.learner.optimizer_steps - before)
        self.last_result = trainer_pb2.StepResponse(
            step=step,
            metrics=metrics,
            seconds=self.learner.seconds,
            optimizer_steps=self.learner.optimizer_steps,
            trained_tokens=int(metrics["global_valid_toks"]),
        )
        return self.last_result

    def save(self, run_state_json: str, metrics: Mapping[str, float]) -> trainer_pb2.SaveResponse:
        """A complete checkpoint of the last completed step; repeating it finds the one that is there."""
        if self.store is None:
            raise InvalidInput("The run has no checkpoint directory", where="Trainer.Save")
        started = time.monotonic()
        found = self.store.find(self.completed_steps)
        if found is None:
            progress = self._progress(metrics)
            found = self.store.write(
                self.completed_steps,
                lambda folder: contents.fill(folder, self.learner, progress, run_state_json),
            )
            self._prune()
        self.checkpointed_steps = found.step
        return trainer_pb2.SaveResponse(
            path=str(found.path), completed_steps=found.step, seconds=time.monotonic() - started
        )

    def export(self, path: str) -> trainer_pb2.ExportResponse:
        """A Hugging Face directory of the current weights, in the dtype of the base model."""
        target = Path(path).absolute()
        replace_directory(target, self._write_export)
        return trainer_pb2.ExportResponse(path=str(target))

    def stage(self, request: trainer_pb2.StageWeightsRequest) -> trainer_pb2.StageWeightsResponse:
        """Put the current weights into shared memory as ``request.version``."""
        if request.transport not in ("", "shm"):
            raise Unsupported(f"Transport {request.transport} is not built yet", do="Use shm.")
        version = request.version
        if self.sender.get(version.incarnation, version.number) is None:
            self._check_current(version.number)
            self._enter(version.incarnation)
        source = HuggingFaceSource(self.learner.policy.network)
        return self.sender.stage(
            version.incarnation, version.number, source, wire_dtype(self.config.model.wire_dtype)
        ).response()

    def score(self, sequences: list[torch.Tensor], temperature: float) -> list[torch.Tensor]:
        """Log-probabilities [S] float32 of each sequence under the weights as engines get them."""
        return self._scorer.score(sequences, temperature)

    def state(self, process: str) -> trainer_pb2.TrainerState:
        """Where this run is."""
        state = trainer_pb2.TrainerState(
            run=self.run,
            ready=True,
            completed_steps=self.completed_steps,
            optimizer_steps=self.learner.optimizer_steps,
            process=process,
            device=str(self.learner.device),
            parameters=self.learner.parameters,
            vocab_size=self.learner.policy.vocab_size,
        )
        if self.checkpointed_steps is not None:
            state.checkpointed_steps = self.checkpointed_steps
        return state

    def _load(self, device: torch.device) -> Learner:
        candidates = self.store.candidates() if self.store is not None else []
        for checkpoint in candidates:
            try:
                return self._resume(checkpoint, device)
            except Corrupt as exc:
                _log.error("checkpoint passed over", path=str(checkpoint.path), error=str(exc))
        if candidates:
            raise Corrupt(
                f"None of the {len(candidates)} checkpoints can be read",
                where=str(candidates[0].path.parent),
                do="Move them away to start from the base model.",
            )
        return Learner(self.config, self.config.model.model_name, device)

    def _resume(self, checkpoint: Checkpoint, device: torch.device) -> Learner:
        checkpoint.verify()
        progress = contents.Progress.read(checkpoint)
        if progress.run != self.run:
            raise InvalidInput(
                f"The checkpoint belongs to run {progress.run}",
                where=str(checkpoint.path),
                do="Give each run a checkpoint directory of its own.",
            )
        learner = Learner(self.config, str(checkpoint.path / contents.MODEL), device)
        contents.restore(learner, checkpoint, progress)
        self.completed_steps = self.checkpointed_steps = progress.completed_steps
        if progress.last_result is not None:
            self.last_result = json_format.ParseDict(
                dict(progress.last_result), trainer_pb2.StepResponse(), ignore_unknown_fields=True
            )
        _log.info("resumed", path=str(checkpoint.path), completed_steps=self.completed_steps)
        return learner

    def _check_current(self, number: int) -> None:
        """A version is named after the steps in its weights; no others may travel under its name."""
        if number != self.completed_steps:
            raise Refused(
                f"Version {number} cannot be staged: the weights are those of {self.completed_steps} steps",
                where="Trainer.StageWeights",
                do="Publish the version of the completed steps.",
                reason="WRONG_VERSION",
                completed_steps=str(self.completed_steps),
            )

    def _enter(self, incarnation: int) -> None:
        """Each publish after a restore names a new incarnation; versions of the former are undone."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self.learner.rescorer.forget()

    def _progress(self, metrics: Mapping[str, float]) -> contents.Progress:
        stored = None
        if self.last_result is not None:
            stored = json.loads(json_format.MessageToJson(self.last_result))
        return contents.Progress(
            self.run, self.completed_steps, self.learner.optimizer_steps, stored, dict(metrics)
        )

    def _prune(self) -> None:
        assert self.store is not None, "called after a save"
        known = [(each.step, contents.Progress.read(each).metrics) for each in self.store.candidates()]
        try:
            self.store.keep(steps_to_keep(known, self.config.checkpoint))
        except OSError as exc:
            # The new checkpoint is there; what could not be removed is tried again at the next save.
            _log.error("old checkpoints were not removed", error=str(exc))

    def _write_export(self, folder: Path) -> None:
        model = self.config.model
        write_network(
            self.learner.policy.network,
            folder,
            dtype=source_dtype(model.model_name),
            model=model.model_name,
            tokenizer=model.tokenizer_name,
        )
