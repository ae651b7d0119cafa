"""The trainer's side: weight sources and staging. Imports torch; used by the trainer only."""

from __future__ import annotations

from refit_bridge.sender.shm import ShmSender, StagedWeights
from refit_bridge.sender.source import HuggingFaceSource, TensorSource, WeightSource

__all__ = ["HuggingFaceSource", "ShmSender", "StagedWeights", "TensorSource", "WeightSource"]
