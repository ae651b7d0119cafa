"""Advantages against values worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from trainer_svc.algorithms.advantages import AdvantageSettings, group_advantages

PLAIN = AdvantageSettings(leave_one_out=False, normalize=False)
GRPO = AdvantageSettings(leave_one_out=False, normalize=True)
RLOO = AdvantageSettings(leave_one_out=True, normalize=False)
BOTH = AdvantageSettings(leave_one_out=True, normalize=True)


def one_group(rewards: list[float], settings: AdvantageSettings) -> list[float]:
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, settings).tolist()


def test_mean_baseline() -> None:
    assert one_group([1, 0, 0, 0], PLAIN) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_normalised_by_the_unbiased_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    std, mean = statistics.stdev(rewards), statistics.mean(rewards)
    assert one_group(rewards, GRPO) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])


def test_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    assert one_group([1, 0, 0, 0], RLOO) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_deviation_is_that_of_the_others() -> None:
    # The first sample's siblings are all equal: it keeps its raw difference. The others see {1, 0, 0}.
    std = math.sqrt(1 / 3)
    expected = [1.0] + [-(1 / 3) / (std + 1e-6)] * 3
    assert one_group([1, 0, 0, 0], BOTH) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("settings", [PLAIN, GRPO, RLOO, BOTH])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(settings: AdvantageSettings, reward: float, size: int) -> None:
    assert one_group([reward] * size, settings) == [0.0] * size


@pytest.mark.parametrize("settings", [RLOO, BOTH])
def test_two_samples_leave_one_out_give_the_raw_difference(settings: AdvantageSettings) -> None:
    assert one_group([1.0, 0.25], settings) == pytest.approx([0.75, -0.75])


def test_groups_are_told_by_index_not_by_place() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    groups = torch.tensor([3, 1, 3, 1])
    assert group_advantages(rewards, groups, PLAIN).tolist() == pytest.approx([0.5, -1.0, -0.5, 1.0])


def test_clip_applies_after_normalisation() -> None:
    settings = AdvantageSettings(leave_one_out=False, normalize=True, clip_low=-0.3, clip_high=0.5)
    assert one_group([1, 0, 0, 0], settings) == pytest.approx([0.5, -0.3, -0.3, -0.3])
