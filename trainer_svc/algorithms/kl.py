"""Estimators of a KL divergence from log-probabilities of sampled tokens (Schulman, "Approximating KL").

With x ~ p and d = log q(x) - log p(x): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d; E[k1] = E[k3] = KL(p ||
q). Invariant: k3 is computed with expm1, so that a tiny divergence is not lost to cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """Penalty ``beta`` times the KL to the reference policy; clamps bound |d| and |kl|, None is off."""

    beta: float = 0.0
    kind: Kind = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0
    on_policy: bool = False


def estimate(difference: Tensor, kind: Kind) -> Tensor:
    """The estimator of ``difference`` = log q - log p, elementwise."""
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def penalty(logprobs: Tensor, reference: Tensor, generation: Tensor, settings: KlPenalty) -> Tensor:
    """Per-token KL(policy || reference) [B, S], weighted so that its gradient is that of the expectation.

    The weight exp(l - stop(l)) is 1 and adds the score-function term; ``on_policy`` takes exp(l - l_gen)
    instead, an expectation under the current policy. Where the input clamp is active the weight is detached.
    """
    difference = reference - logprobs
    clamped = _clamp(difference, settings.input_clamp)
    base = generation if settings.on_policy else logprobs.detach()
    weight = torch.exp(logprobs - base)
    weight = torch.where(torch.isfinite(weight), weight, 0.0)
    if settings.input_clamp is not None:
        active = difference.abs() >= settings.input_clamp
        weight = torch.where(active, weight.detach(), weight)
    return _clamp(weight * estimate(clamped, settings.kind), settings.output_clamp)


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
