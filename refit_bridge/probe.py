"""The probe: engine and trainer score the same sequences, and must agree.

Invariants: lengths must match exactly; a value that is no number is a disagreement; position 0 (which has no
log-probability) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.headrace.v1 import rollout_pb2
from services.runtime.errors import Corrupt

Logprobs = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Largest |difference| and where it is; ``ok`` when it is within the tolerance."""

    error: float
    sequence: int
    position: int
    engine: float
    trainer: float
    ok: bool

    def __str__(self) -> str:
        return (
            f"log-probabilities differ by {self.error:.3g} in sequence {self.sequence} at position "
            f"{self.position} (engine {self.engine:.5g}, trainer {self.trainer:.5g})"
        )


def request(
    run: str, sequences: Sequence[bytes], temperature: float, engine: str = ""
) -> rollout_pb2.ScoreTokensRequest:
    """The question to either side."""
    return rollout_pb2.ScoreTokensRequest(
        run=run, sequences=sequences, temperature=temperature or 1.0, engine=engine, probe=True
    )


def read(response: rollout_pb2.ScoreTokensResponse, sequences: Sequence[bytes], *, where: str) -> Logprobs:
    """The answer as arrays; raises Corrupt when it does not fit the question."""
    rows = [np.frombuffer(data, dtype="<f4") for data in response.logprobs]
    lengths = [len(ids) // 4 for ids in sequences]
    if [len(row) for row in rows] != lengths:
        raise Corrupt(
            f"Scores of lengths {[len(r) for r in rows]} answer sequences of {lengths}", where=where
        )
    return rows


def compare(engine: Logprobs, trainer: Logprobs, tolerance: float) -> Agreement:
    """The worst place of all sequences."""
    worst = Agreement(0.0, 0, 0, 0.0, 0.0, True)
    for i, (mine, theirs) in enumerate(zip(engine, trainer, strict=True)):
        with np.errstate(invalid="ignore"):  # inf - inf: found below
            difference = np.abs(mine[1:].astype(np.float64) - theirs[1:].astype(np.float64))
        difference[np.isnan(difference)] = np.inf
        if not difference.size:
            continue
        at = int(difference.argmax())
        if difference[at] > worst.error:
            error = float(difference[at])
            worst = Agreement(
                error, i, at + 1, float(mine[at + 1]), float(theirs[at + 1]), error <= tolerance
            )
    return worst
