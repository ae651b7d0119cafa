"""Advantages of groups of samples of one prompt.

Invariants
- A group whose rewards are all equal, or that has one sample only, has advantage exactly 0: equality is
  tested directly, because E[r^2] - E[r]^2 in floating point leaves a residue that normalisation would blow
  up.
- Groups are given by explicit index, never found by equal prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """GRPO's estimator (Shao et al. 2024); ``leave_one_out`` is RLOO's baseline (Ahmadian et al. 2024)."""

    leave_one_out: bool = True
    normalize: bool = True
    clip_low: float | None = None
    clip_high: float | None = None


def group_advantages(rewards: Tensor, groups: Tensor, settings: AdvantageSettings) -> Tensor:
    """A_i = (r_i - b_i) / (std_i + 1e-6), clipped; rewards [N] float, groups [N] int64 -> [N] float32.

    b_i is the group's mean, or the mean of the others with ``leave_one_out``; std_i is the unbiased deviation
    of the same set. A sample whose std_i is 0 keeps its raw difference.
    """
    result = torch.zeros(rewards.shape[0], dtype=torch.float64)
    for group in torch.unique(groups).tolist():
        rows = torch.nonzero(groups == group).squeeze(1)
        result[rows] = _one_group(rewards[rows].double(), settings)
    if settings.clip_low is not None or settings.clip_high is not None:
        result = result.clamp(settings.clip_low, settings.clip_high)
    return result.float()


def _one_group(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    if rewards.shape[0] == 1 or _constant(rewards[None])[0]:
        return torch.zeros_like(rewards)
    sets = _others(rewards) if settings.leave_one_out else rewards.expand(rewards.shape[0], -1)
    difference = rewards - sets.mean(dim=1)
    if not settings.normalize or sets.shape[1] == 1:
        return difference
    std = torch.where(_constant(sets), 0.0, sets.std(dim=1, unbiased=True))
    return torch.where(std > 0, difference / (std + STD_EPSILON), difference)


def _others(rewards: Tensor) -> Tensor:
    """Row i is all rewards but the i-th: [G] -> [G, G - 1]."""
    size = rewards.shape[0]
    return rewards.expand(size, size)[~torch.eye(size, dtype=torch.bool)].view(size, size - 1)


def _constant(sets: Tensor) -> Tensor:
    return sets.amin(dim=1) == sets.amax(dim=1)
