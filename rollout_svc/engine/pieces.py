"""What a turn sampled, piece by piece: an in-flight update may have changed the weights in between.

Invariant: ids, log-probabilities and label spans have one length; spans are in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protos.headrace.v1 import types_pb2
from rollout_svc.engine.core_types import LabelSpan, Sampled
from rollout_svc.turns.ids import IDS


@dataclass(slots=True)
class Pieces:
    """The tokens of one turn so far; ``number`` counts the pieces that have any."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[LabelSpan] = field(default_factory=list)
    number: int = 0
    finish: str = ""
    stop_string: str = ""
    cached_tokens: int = 0

    def add(self, piece: Sampled, labels: Sequence[LabelSpan]) -> None:
        """Append one generation whose tokens ``labels`` tile."""
        if not self.number:
            self.cached_tokens = piece.cached_tokens
        self.number += bool(piece.ids)
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.labels += labels
        self.finish, self.stop_string = piece.finish, piece.stop_string


def version_bytes(spans: Sequence[LabelSpan], versions: Sequence[types_pb2.PolicyVersion]) -> bytes:
    """The version number of each token as int32; ``versions`` are those of ``spans``."""
    numbers = np.array([version.number for version in versions], IDS)
    return np.repeat(numbers, [span.length for span in spans]).tobytes()


def in_order(versions: Sequence[types_pb2.PolicyVersion]) -> list[types_pb2.PolicyVersion]:
    """Each version once, in order of appearance."""
    seen: dict[tuple[int, int], types_pb2.PolicyVersion] = {}
    for version in versions:
        seen.setdefault((version.incarnation, version.number), version)
    return list(seen.values())
