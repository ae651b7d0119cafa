"""What is in a checkpoint: ``model/`` (Hugging Face, FP32), ``optimizer.pt``, and two JSON files.

Invariants
- ``optimizer.pt`` holds tensors and primitive values only and is read with ``weights_only=True``.
- Together with the buffer's groups this is all that a step depends on: training from here equals training
  that was never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.runtime.errors import Corrupt
from services.runtime.logs import get_logger
from trainer_svc.checkpoint.store import Checkpoint
from trainer_svc.learner import Learner
from trainer_svc.models.load import write_network

MODEL = "model"
OPTIMIZER = "optimizer.pt"
TRAINING = "training_info.json"
RUN_STATE = "run_state.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: steps in the weights, optimizer steps, and the last step's result."""

    run: str
    completed_steps: int
    optimizer_steps: int
    last_result: Mapping[str, Any] | None = None
    """The JSON form of the last ``StepResponse``."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, indent=1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Progress:
        """The progress that ``checkpoint`` holds; raises Corrupt."""
        try:
            return cls(**checkpoint.read_json(TRAINING))
        except (OSError, ValueError, TypeError) as exc:
            raise Corrupt(f"{TRAINING} is damaged", where=str(checkpoint.path)) from exc


def fill(folder: Path, learner: Learner, progress: Progress, run_state_json: str) -> None:
    """Write everything into ``folder``."""
    config = learner.config
    write_network(
        learner.policy.network,
        folder / MODEL,
        dtype=torch.float32,
        model=config.model.model_name,
        tokenizer=config.model.tokenizer_name,
    )
    if config.checkpoint.save_optimizer:
        with (folder / OPTIMIZER).open("wb") as file:
            torch.save(_optimizer_state(learner), file)
    (folder / TRAINING).write_text(progress.to_json())
    (folder / RUN_STATE).write_text(run_state_json or "{}")


def restore(learner: Learner, checkpoint: Checkpoint, progress: Progress) -> None:
    """Optimizer, schedule and random state of ``checkpoint``; the weights were loaded with the model."""
    learner.optimizer_steps = progress.optimizer_steps
    path = checkpoint.path / OPTIMIZER
    if not path.is_file():
        get_logger("trainer").warning("no optimizer in the checkpoint: a fresh one starts", path=str(path))
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.scheduler is not None and state["scheduler"] is not None:
        learner.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"]["cpu"])
    if state["rng"]["cuda"] is not None and learner.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng"]["cuda"], learner.device)


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state(learner.device) if learner.device.type == "cuda" else None
    return {
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": None if learner.scheduler is None else learner.scheduler.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
    }
