"""Importance correction between the engine that sampled and the trainer that learns.

Invariants: weights are constants (no gradient); a weight that is not finite counts as 0; truncation never
changes the denominator of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Correction:
    """``tis`` clamps weights to [low, high]; ``icepop`` zeroes those outside."""

    enabled: bool = False
    truncation: Literal["tis", "icepop"] | None = None
    low: float | None = None
    high: float | None = None


class Weights(NamedTuple):
    """Per token [B, S]: ``raw`` = p_train / p_engine, ``truncated``, ``final`` (multiplies the loss; 1 when
    the
    correction is off), and ``outside`` the bounds (bool)."""

    raw: Tensor
    truncated: Tensor
    final: Tensor
    outside: Tensor


def importance_weights(previous: Tensor, generation: Tensor, correction: Correction) -> Weights:
    """w_t = exp(l_old - l_gen), truncated; both log-probabilities [B, S] in nats.

    Truncated importance sampling (Yao et al. 2025) and IcePop (Ling team 2025). A correction that is off
    still tells the raw weights, so that a mismatch is seen.
    """
    ratio = torch.exp(previous.detach() - generation)
    raw = torch.where(torch.isfinite(ratio), ratio, 0.0)
    low, high = correction.low or 0.0, correction.high
    outside = torch.zeros_like(raw, dtype=torch.bool)
    if high is not None:
        outside = (raw < low) | (raw > high)
    truncated = raw
    if correction.truncation == "tis":
        truncated = raw.clamp(low, high)
    elif correction.truncation == "icepop":
        truncated = raw.masked_fill(outside, 0.0)
    return Weights(raw, truncated, truncated if correction.enabled else torch.ones_like(raw), outside)
