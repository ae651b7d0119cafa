"""Which checkpoints stay: the latest, and the best (or most recent) ``keep_top_k``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainer_svc.config import CheckpointConfig


def steps_to_keep(metrics: Sequence[tuple[int, Mapping[str, float]]], config: CheckpointConfig) -> set[int]:
    """Steps that stay, of (step, metrics at that step); ties go to the newer, a missing metric ranks last."""
    steps = sorted((step for step, _ in metrics), reverse=True)
    if config.keep_top_k is None or not steps:
        return set(steps)
    if config.metric is not None:
        ranks = {step: _rank(values, config) for step, values in metrics}
        steps = sorted(ranks, key=lambda step: (ranks[step], step), reverse=True)
    return {max(steps), *steps[: config.keep_top_k]}


def _rank(values: Mapping[str, float], config: CheckpointConfig) -> float:
    assert config.metric is not None, "ranked by a metric only"
    value = values.get(config.metric, math.nan)
    if math.isnan(value):
        return -math.inf
    return value if config.higher_is_better else -value
