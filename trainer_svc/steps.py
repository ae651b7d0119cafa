"""The fence of the step loop: which command may act, which is a repeat, which is refused.

Invariants: an epoch never falls; a step is trained at most once; a repeat gets the stored answer of the
first.
"""

from __future__ import annotations

from enum import Enum

from protos.headrace.v1 import types_pb2
from services.runtime.errors import Fenced, Refused


class Decision(Enum):
    """What to do with a Step."""

    TRAIN = "train"
    REPEAT = "repeat"


class EpochFence:
    """The newest epoch that commanded this run."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def admit(self, fence: types_pb2.Fence, command: str) -> None:
        """Take over a newer epoch; raise Fenced for an older one."""
        if fence.epoch < self.epoch:
            raise Fenced(
                f"{command} of epoch {fence.epoch} is refused: epoch {self.epoch} commands this run",
                where=f"Trainer.{command}",
                do="Stop: another controller has taken over.",
            )
        self.epoch = fence.epoch


def decide(step: int, completed_steps: int) -> Decision:
    """Whether step ``step`` is the next one or a repeat of the last; raises Refused naming both otherwise."""
    if step == completed_steps:
        return Decision.TRAIN
    if step == completed_steps - 1:
        return Decision.REPEAT
    raise Refused(
        f"Step {step} cannot be trained: {completed_steps} steps are complete",
        where="Trainer.Step",
        do="Ask Status where the trainer is, and continue there.",
        reason="WRONG_STEP",
        completed_steps=str(completed_steps),
        step=str(step),
    )
