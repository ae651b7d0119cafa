"""Checks the sampling parameters of a turn.

Invariants
- Every optional field of the contract is given: nothing is filled in from a default or a model's own file.
- What the engine would change in silence is refused (it clamps temperatures below ``MIN_TEMPERATURE``).
- A turn that trains is not truncated: the trainer computes log-probabilities of the full distribution at the
  sampling temperature, and those of a renormalised one would differ by the log of the kept mass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protos.headrace.v1 import types_pb2
from services.runtime.errors import InvalidInput, Unsupported

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
REQUIRED = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
TRAIN_BOOK = "train"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling parameters; ``top_k`` 0 is off, ``temperature`` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    bad_words: tuple[str, ...]

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut from the distribution before sampling."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def check_sampling(params: types_pb2.SamplingParams, *, book: str) -> Sampling:
    """``params`` checked for a turn of ``book``; raises InvalidInput naming the field, or Unsupported."""
    for name in REQUIRED:
        if not params.HasField(name):  # type: ignore[arg-type]  # checked against the proto by a test
            raise _bad(name, "is not set", "Sampling parameters are always explicit.")
    # float32 on the wire: 0.7 must be 0.7 again, or the recorded temperature is not the recipe's.
    sampling = Sampling(
        temperature=_short(params.temperature),
        top_p=_short(params.top_p),
        top_k=max(0, params.top_k),
        min_p=_short(params.min_p),
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        bad_words=tuple(params.bad_words),
    )
    _check_ranges(sampling, params.top_k)
    if book == TRAIN_BOOK and sampling.truncated:
        raise Unsupported(
            "top_p < 1, top_k > 0 and min_p > 0 are not supported for turns that train",
            where="sampling",
            do="Set top_p 1, top_k -1 and min_p 0; the trainer works on the full distribution.",
            reason="TRUNCATED_SAMPLING",
        )
    return sampling


def _check_ranges(sampling: Sampling, top_k: int) -> None:
    temperature = sampling.temperature
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise _bad("temperature", f"is {temperature}", f"Use 0 (greedy) or 0.01 to {MAX_TEMPERATURE:g}.")
    if 0 < temperature < MIN_TEMPERATURE:
        raise _bad("temperature", f"is {temperature}", "The engine would clamp it to 0.01; use 0 for greedy.")
    if not 0 < sampling.top_p <= 1:
        raise _bad("top_p", f"is {sampling.top_p}", "Use a value in (0, 1].")
    if top_k < -1:
        raise _bad("top_k", f"is {top_k}", "Use -1 for off, else the number of tokens.")
    if not 0 <= sampling.min_p <= 1:
        raise _bad("min_p", f"is {sampling.min_p}", "Use a value in [0, 1].")
    if sampling.max_new_tokens < 1:
        raise _bad("max_new_tokens", "is 0", "Use at least 1.")


def _bad(name: str, what: str, do: str) -> InvalidInput:
    return InvalidInput(f"sampling.{name} {what}", where=f"sampling.{name}", do=do)


def _short(value: float) -> float:
    return float(f"{value:.7g}")
