"""What a verifier is.

Invariants
- A verifier sees the row as it stands in the file, the conversation and how the sample ended; no tokens.
- It answers with a finite score, or raises: a failure is never a score.
- The same item gets the same score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


class VerifierError(Exception):
    """This item cannot be judged; the text says why."""


@dataclass(frozen=True, slots=True)
class Item:
    """One finished sample.

    ``messages`` are mappings with ``role`` and ``content``, and ``reasoning`` and ``tool_calls`` where there
    are any; ``outcome`` is ``completed`` or ``truncated``; ``options`` are the verifier's own settings.
    """

    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    outcome: str = "completed"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """Content of the last assistant message; raises VerifierError when there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content", ""))
        raise VerifierError("the conversation has no assistant message")

    def to_json(self) -> dict[str, Any]:
        """For the wire between the service and a verifier process."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's answer; ``components`` are named parts, for people."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


Scorer = Callable[[Item], "Awaitable[Score | float] | Score | float"]


def as_score(given: object) -> Score:
    """``given`` as a score; raises VerifierError when it is none, or not finite."""
    score = given if isinstance(given, Score) else Score(_number(given))
    values = [score.value, *score.components.values()]
    if not all(math.isfinite(_number(value)) for value in values):
        raise VerifierError(f"the verifier's score is not finite: {values}")
    return Score(float(score.value), {str(key): float(value) for key, value in score.components.items()})


def expected_answers(row: Mapping[str, Any]) -> list[str]:
    """The answers that count as right: ``expected_answer`` of the row or of its ``verifier_metadata``.

    A list means any of its entries. Raises VerifierError when there is none.
    """
    metadata = row.get("verifier_metadata")
    places = [row, metadata if isinstance(metadata, Mapping) else {}]
    found = next(
        (place["expected_answer"] for place in places if place.get("expected_answer") is not None), None
    )
    answers = found if isinstance(found, list) else [found]
    if found is None or not answers:
        raise VerifierError("the row has no expected_answer")
    return [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]


def _number(value: object) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise VerifierError(f"a score must be a number, not {type(value).__name__}")
