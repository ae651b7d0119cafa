"""Transforms: every stage kept, in order."""

from __future__ import annotations

import pytest

from reward_svc.config import EnvConfig, RewardScaling
from reward_svc.transforms import build_reward, transforms_of
from reward_svc.verifiers.base import Score, VerifierError, as_score
from services.runtime.errors import InvalidInput


def test_without_transforms_the_verifiers_value_is_the_reward():
    reward = build_reward("exact_answer", Score(1.0, {"format": 0.5}), transforms_of(EnvConfig()))
    assert reward.value == 1.0
    assert [(stage.name, stage.value) for stage in reward.stages] == [("verifier", 1.0)]
    assert dict(reward.components) == {"format": 0.5}
    assert reward.verifier == "exact_answer"


@pytest.mark.parametrize(("raw", "scaled"), [(0, -1), (1, 1), (0.25, -0.5), (7, 1), (-7, -1)])
def test_scaling_is_linear_and_clamps(raw, scaled):
    env = EnvConfig(reward_scaling=RewardScaling(enabled=True, target_min=-1, target_max=1))
    reward = build_reward("v", Score(raw), transforms_of(env))
    assert reward.value == scaled
    assert [(stage.name, stage.value) for stage in reward.stages] == [("verifier", raw), ("scale", scaled)]


def test_an_empty_source_range_is_refused():
    env = EnvConfig(reward_scaling=RewardScaling(enabled=True, source_min=1, source_max=1))
    with pytest.raises(InvalidInput, match="source_min"):
        transforms_of(env)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), "1", None, Score(1.0, {"part": float("nan")})])
def test_only_a_finite_number_is_a_score(given):
    with pytest.raises(VerifierError):
        as_score(given)
