"""Losses of one micro-batch, as a share of its global batch.

Invariant: a loss divides by the counts of the *global* batch, so that gradients do not depend on how rows
were split into micro-batches. All per-token tensors are [B, S]; position t belongs to token t, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_svc.algorithms.correction import Correction, Weights, importance_weights
from trainer_svc.algorithms.kl import KlPenalty, penalty
from trainer_svc.algorithms.masked import Counts, normalise


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """Clipped-ratio loss (PPO, Schulman et al. 2017; asymmetric bounds DAPO, Yu et al. 2025)."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    """Dual clip (Ye et al. 2020): caps the loss of a negative advantage at -A * c."""
    token_level: bool = True
    force_on_policy_ratio: bool = False
    correction: Correction = field(default_factory=Correction)
    kl: KlPenalty = field(default_factory=KlPenalty)


class PolicyInputs(NamedTuple):
    """Constants of a micro-batch; ``previous`` is None when the ratio is forced to be on-policy."""

    generation: Tensor
    previous: Tensor | None
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor


class PolicyTerms(NamedTuple):
    """The loss (scalar, with gradient) and what metrics need of it (per token, without)."""

    loss: Tensor
    previous: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    weights: Weights
    kl: Tensor | None


def clipped_policy_loss(
    logprobs: Tensor, inputs: PolicyInputs, counts: Counts, settings: PolicyLossSettings
) -> PolicyTerms:
    """sum_t w_t max(-A rho, -A clip(rho)) + beta KL, normalised over the global batch.

    rho = exp(l - l_old); w_t corrects for the engine. With ``force_on_policy_ratio`` l_old is l itself
    without gradient.
    """
    previous = logprobs.detach() if inputs.previous is None else inputs.previous
    ratio = torch.exp(torch.where(inputs.mask, logprobs - previous, 0.0))
    clipped = ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    weights = importance_weights(previous, inputs.generation, settings.correction)
    surrogate = weights.final * _surrogate(ratio, clipped, inputs.advantages, settings.ratio_clip_c)
    loss = normalise(surrogate, inputs.mask, counts, token_level=settings.token_level)
    kl = None
    if settings.kl.beta and inputs.reference is not None:
        kl = penalty(logprobs, inputs.reference, inputs.generation, settings.kl)
        loss = loss + settings.kl.beta * normalise(kl, inputs.mask, counts, token_level=settings.token_level)
    return PolicyTerms(loss, previous, ratio.detach(), clipped.detach(), weights, kl)


def negative_log_likelihood(logprobs: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """-sum_t m_t l_t / tokens of the global batch: supervised fine-tuning. Scalar, with gradient."""
    return normalise(-logprobs, mask, counts, token_level=True)


def _surrogate(ratio: Tensor, clipped: Tensor, advantages: Tensor, dual_clip: float | None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
