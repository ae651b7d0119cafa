"""What happens to a reward after its verifier: pure functions in a fixed order.

Invariants: every stage is kept, "verifier" first; the value is the last stage's; the order is that of
``ORDER``, whatever the order of the recipe's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protos.headrace.v1 import types_pb2
from reward_svc.config import EnvConfig, RewardScaling
from reward_svc.verifiers.base import Score
from services.runtime.errors import InvalidInput

ORDER = ("scale",)
Transform = tuple[str, Callable[[float], float]]


def transforms_of(env: EnvConfig) -> Sequence[Transform]:
    """The transforms that are switched on, in order. Raises InvalidInput."""
    active: dict[str, Callable[[float], float]] = {}
    if env.reward_scaling.enabled:
        active["scale"] = scaler(env.reward_scaling)
    return [(name, active[name]) for name in ORDER if name in active]


def scaler(scaling: RewardScaling) -> Callable[[float], float]:
    """target_min + (clamp(r) − source_min) / (source_max − source_min) · (target_max − target_min)."""
    low, high = scaling.source_min, scaling.source_max
    if not low < high:
        raise InvalidInput("source_min must be below source_max", where="reward_scaling")
    slope = (scaling.target_max - scaling.target_min) / (high - low)
    return lambda value: scaling.target_min + (min(max(value, low), high) - low) * slope


def build_reward(verifier: str, score: Score, transforms: Sequence[Transform]) -> types_pb2.Reward:
    """The reward with all its stages."""
    stages = [types_pb2.RewardStage(name="verifier", value=score.value)]
    for name, transform in transforms:
        stages.append(types_pb2.RewardStage(name=name, value=transform(stages[-1].value)))
    return types_pb2.Reward(
        value=stages[-1].value, stages=stages, components=dict(score.components), verifier=verifier
    )
