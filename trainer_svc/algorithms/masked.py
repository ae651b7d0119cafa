"""Masked reductions.

Invariant: what lies under a zero mask never reaches a result, be it NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps an empty global batch at zero instead of NaN.
TINY = 1e-8


@dataclass(frozen=True, slots=True)
class Counts:
    """Size of one global batch after all masks: the denominators of its loss."""

    tokens: int
    sequences: int


def count(mask: Tensor) -> Counts:
    """Trained tokens and sequences with at least one of them, of ``mask`` [B, S] (bool)."""
    return Counts(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` where ``mask`` (bool, same shape); float64, no gradient."""
    return torch.where(mask, values.detach().double(), 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` [B, S] over each row's masked tokens; [B], 0 for a row without any."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def normalise(per_token: Tensor, mask: Tensor, counts: Counts, *, token_level: bool) -> Tensor:
    """The share of a micro-batch in its global batch's mean; shares add up to that mean.

    Token level: sum_t m_t x_t / tokens. Sequence level: sum_i mean_t(x_it) / sequences. Scalar, with
    gradient.
    """
    if token_level:
        kept = torch.where(mask, per_token, torch.zeros_like(per_token))
        return kept.sum() / (counts.tokens + TINY)
    return masked_mean(per_token, mask).sum() / (counts.sequences + TINY)
