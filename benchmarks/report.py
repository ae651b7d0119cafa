"""What a benchmark reports.

Invariants: a claim names its baseline; both were measured in the same run on the same machine, and the ratio
is value / baseline. A module ``benchmarks.NAME`` has ``SUMMARY`` (one line) and ``run(args)``, which parses
its own arguments with argparse, says what it does on stderr, and returns claims.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure against its baseline; ``unit`` is that of ``value`` and ``baseline``."""

    name: str
    value: float
    baseline: float
    unit: str
    baseline_name: str
    settings: Mapping[str, Any]
    bar: float | None = None
    """The ratio that is promised; None when nothing is."""
    extra: Mapping[str, Any] | None = None
    """What else was measured (final accuracies, losses, losses of samples)."""

    @property
    def ratio(self) -> float:
        """value / baseline."""
        return self.value / self.baseline

    @property
    def met(self) -> bool:
        """Whether the promise was kept."""
        return self.bar is None or self.ratio >= self.bar

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


class Benchmark(Protocol):
    """What a module of this package offers."""

    SUMMARY: str

    def run(self, args: Sequence[str]) -> list[Claim]:
        """Measure; raises an error of the tree when nothing could be measured."""
        ...


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def dump(claims: Sequence[Claim]) -> str:
    """One JSON object for one claim, an array for several."""
    found = [claim.to_dict() for claim in claims]
    return json.dumps(found[0] if len(found) == 1 else found, indent=1)
