"""Step metrics about rewards and advantages (names as in NeMo RL)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_svc.data.rows import StepRows


def reward_metrics(rows: StepRows, advantages: Tensor) -> dict[str, float]:
    """Of all rows of the step; ``advantages`` is [N]. ``advantages/*`` are over trained tokens."""
    mask = rows.tokens.columns["mask"]
    per_token = rows.tokens.columns["advantages"][mask]
    means = _group_means(rows)
    found = {
        "reward": float(rows.rewards.mean()),
        "baseline_reward/pct_0": float((means == 0).double().mean()),
        "baseline_reward/pct_1": float((means == 1).double().mean()),
        "baseline_reward/pct_mixed": float(((means > 0) & (means < 1)).double().mean()),
        "truncation_rate": float(rows.truncated.double().mean()),
        "rows_without_signal": float((advantages == 0).double().mean()),
    }
    if per_token.numel():
        found |= {
            "advantages/mean": float(per_token.double().mean()),
            "advantages/max": float(per_token.max()),
            "advantages/min": float(per_token.min()),
            "advantages/sum": float(per_token.double().sum()),
        }
    return found


def _group_means(rows: StepRows) -> Tensor:
    groups = int(rows.groups.max()) + 1
    sums = torch.zeros(groups, dtype=torch.float64).index_add_(0, rows.groups, rows.rewards)
    return sums / torch.bincount(rows.groups, minlength=groups).clamp(min=1)
