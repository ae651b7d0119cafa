"""Which complete groups are trained on: pure rules.

Invariants: a rule looks at one group only and at nothing outside it; only the train book has rules; a group
with several faults is dropped for the first in the order of ``judge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGE = "age"
TOO_FEW = "too_few_siblings"
ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True, slots=True)
class Rules:
    """Admission rules of a run."""

    drop_zero_variance: bool = False
    minimum_siblings: int = 0
    """0 is all."""
    max_age: int | None = None
    """In policy versions; None is any."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete group: its size, target step, and reward and lowest version of each usable sample."""

    samples: int
    step: int
    rewards: Sequence[float | None]
    versions: Sequence[int | None]

    @property
    def lowest_version(self) -> int | None:
        """None when nothing was sampled."""
        return min((version for version in self.versions if version is not None), default=None)


def judge(group: Candidate, rules: Rules) -> str:
    """Why ``group`` is dropped; empty when it is admitted."""
    if len(group.rewards) < (min(rules.minimum_siblings, group.samples) or group.samples):
        return TOO_FEW
    lowest = group.lowest_version
    if rules.max_age is not None and lowest is not None and group.step - lowest > rules.max_age:
        return AGE
    if rules.drop_zero_variance and _all_equal(group.rewards):
        return ZERO_VARIANCE
    return ""


def _all_equal(rewards: Sequence[float | None]) -> bool:
    # A single sample has no variance to lose, and supervised data no rewards.
    return len(rewards) > 1 and rewards[0] is not None and all(value == rewards[0] for value in rewards)
