"""``math_verify``: the final answer is mathematically equal to the expected one (package math-verify).

Invariants
- Runs in a verifier process only (the package is imported on first use): it is CPU-heavy, can hang and can
  eat memory. Its own time limits are off, because they turn into "not equal": a reward for a failure.
- An expected answer that cannot be parsed is an error of the row; an answer of the policy that contains no
  mathematics is wrong.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

from reward_svc.verifiers.base import Item, Score, VerifierError, expected_answers

THRESHOLD_CACHE = 4096


def score(item: Item) -> Score:
    """1 when the answer equals one of the expected ones, else 0."""
    text = item.answer.rpartition("</think>")[2]
    gold = [_gold(expected) for expected in expected_answers(item.row)]
    given = _parse(text)
    right = bool(given) and any(_verify(expected, given) for expected in gold)
    return Score(float(right))


def warm() -> None:
    """Import the package and parse once, so that the first item does not pay for it."""
    _verify(_gold("1"), _parse("\\boxed{1}"))


@cache
def _package() -> Any:
    import math_verify

    # It warns on every process that time limits are off; ours is the process's life.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@lru_cache(THRESHOLD_CACHE)
def _gold(expected: str) -> Any:
    bare = expected.strip().removeprefix("$").removesuffix("$").removeprefix("\\(").removesuffix("\\)")
    text = bare if "\\boxed" in bare else f"\\boxed{{{bare}}}"
    parsed = _parse(text)
    if not parsed:
        raise VerifierError(f"the expected answer {expected!r} cannot be parsed")
    return parsed


def _parse(text: str) -> Any:
    package = _package()
    targets = (package.LatexExtractionConfig(boxed_match_priority=0), package.ExprExtractionConfig())
    return package.parse(text, extraction_config=targets, parsing_timeout=None, raise_on_error=True)


def _verify(gold: Any, given: Any) -> bool:
    return bool(_package().verify(gold, given, timeout_seconds=None, raise_on_error=True))
