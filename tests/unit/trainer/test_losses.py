"""Losses, corrections and metrics against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer_svc.algorithms.correction import Correction, importance_weights
from trainer_svc.algorithms.kl import KlPenalty, estimate, penalty
from trainer_svc.algorithms.losses import (
    PolicyInputs,
    PolicyLossSettings,
    clipped_policy_loss,
    negative_log_likelihood,
)  # fmt: skip
from trainer_svc.algorithms.masked import count
from trainer_svc.algorithms.metrics import StepMetrics, policy_bounds, policy_sums, sequence_errors

NOW = [[0.0, -1.0, -2.0, -0.5], [0.0, -0.3, -1.5, 9.0]]
OLD = [[0.0, -1.2, -1.5, -0.5], [0.0, -0.9, -1.4, 9.0]]
GEN = [[0.0, -1.1, -1.7, -0.6], [0.0, -0.8, -1.6, float("nan")]]
ADV = [[2.0] * 4, [-1.0] * 4]
MASK = [[0, 1, 1, 1], [0, 1, 1, 0]]
CELLS = [(row, at) for row in range(2) for at in range(4) if MASK[row][at]]


def inputs(**given: Tensor | None) -> PolicyInputs:
    values = {
        "generation": torch.tensor(GEN),
        "previous": torch.tensor(OLD),
        "reference": None,
        "advantages": torch.tensor(ADV),
        "mask": torch.tensor(MASK, dtype=torch.bool),
    }
    return PolicyInputs(**{**values, **given})  # type: ignore[arg-type]


def plain_surrogate(row: int, at: int, low: float, high: float, dual: float | None = None) -> float:
    ratio = math.exp(NOW[row][at] - OLD[row][at])
    clipped = min(max(ratio, 1 - low), 1 + high)
    advantage = ADV[row][at]
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * dual) if dual is not None and advantage < 0 else loss


def loss_of(settings: PolicyLossSettings, **given: Tensor | None) -> float:
    given_inputs = inputs(**given)
    terms = clipped_policy_loss(torch.tensor(NOW), given_inputs, count(given_inputs.mask), settings)
    return float(terms.loss)


def test_clipped_ratio_token_level() -> None:
    expected = sum(plain_surrogate(*cell, 0.2, 0.28) for cell in CELLS) / 5
    assert loss_of(PolicyLossSettings(0.2, 0.28)) == pytest.approx(expected, rel=1e-6)


def test_sequence_level_averages_rows_first() -> None:
    rows = [[plain_surrogate(*cell, 0.2, 0.2) for cell in CELLS if cell[0] == row] for row in range(2)]
    expected = sum(sum(row) / len(row) for row in rows) / 2
    assert loss_of(PolicyLossSettings(token_level=False)) == pytest.approx(expected, rel=1e-6)


def test_dual_clip_bounds_negative_advantages() -> None:
    expected = sum(plain_surrogate(*cell, 0.2, 0.2, dual=1.5) for cell in CELLS) / 5
    assert loss_of(PolicyLossSettings(ratio_clip_c=1.5)) == pytest.approx(expected, rel=1e-6)
    assert expected < loss_of(PolicyLossSettings())


def test_forced_on_policy_ratio_is_one_and_has_the_policy_gradient() -> None:
    logprobs = torch.tensor(NOW, requires_grad=True)
    given = inputs(previous=None)
    settings = PolicyLossSettings(force_on_policy_ratio=True)
    terms = clipped_policy_loss(logprobs, given, count(given.mask), settings)
    torch.autograd.backward(terms.loss)
    assert logprobs.grad is not None
    expected = torch.where(given.mask, -given.advantages / 5, 0.0)
    torch.testing.assert_close(logprobs.grad, expected)
    assert terms.ratio.eq(1).all()


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([[0.0, 1.0, -1.0]], requires_grad=True)
    given = PolicyInputs(
        torch.zeros(1, 3), torch.zeros(1, 3), None, torch.ones(1, 3), torch.tensor([[False, True, True]])
    )
    torch.autograd.backward(
        clipped_policy_loss(logprobs, given, count(given.mask), PolicyLossSettings()).loss
    )
    assert logprobs.grad is not None
    # ratio e > 1.2 with a positive advantage is clipped; ratio 1/e still pulls up.
    assert logprobs.grad[0, 1] == 0
    assert logprobs.grad[0, 2] == pytest.approx(-math.exp(-1) / 2)


@pytest.mark.parametrize(
    ("correction", "change"),
    [
        (Correction(enabled=True), lambda w: w),
        (Correction(True, "tis", None, 1.0), lambda w: min(w, 1.0)),
        (Correction(True, "tis", 0.95, 1.05), lambda w: min(max(w, 0.95), 1.05)),
        (Correction(True, "icepop", 0.95, 1.05), lambda w: w if 0.95 <= w <= 1.05 else 0.0),
        (Correction(), lambda _: 1.0),
    ],
)
def test_importance_correction_weighs_each_token(correction: Correction, change: object) -> None:
    assert callable(change)
    expected = sum(
        change(math.exp(OLD[r][t] - GEN[r][t])) * plain_surrogate(r, t, 0.2, 0.2) for r, t in CELLS
    )
    # Tokens that icepop drops still count in the denominator.
    assert loss_of(PolicyLossSettings(correction=correction)) == pytest.approx(expected / 5, rel=1e-6)


def test_weights_that_are_not_finite_count_as_zero() -> None:
    generation = torch.tensor([[-200.0, float("nan"), float("-inf"), -1.0]])
    weights = importance_weights(torch.tensor([[0.0, 0.0, 0.0, -1.0]]), generation, Correction(enabled=True))
    assert weights.final.tolist() == [[0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("d", [-3.0, -1e-5, 0.0, 1e-6, 0.7])
def test_kl_estimators(d: float) -> None:
    value = torch.tensor(d, dtype=torch.float64)
    assert float(estimate(value, "k1")) == pytest.approx(-d)
    assert float(estimate(value, "k2")) == pytest.approx(d * d / 2)
    assert float(estimate(value, "k3")) == pytest.approx(math.expm1(d) - d, abs=1e-18)


def test_kl_penalty_adds_beta_times_its_mean() -> None:
    reference = torch.tensor([[0.0, -1.0, -1.0, -2.5], [0.0, -0.1, -1.5, 0.0]])
    kl = KlPenalty(beta=0.3)
    d = [float(reference[cell]) - NOW[cell[0]][cell[1]] for cell in CELLS]
    expected = loss_of(PolicyLossSettings()) + 0.3 * sum(math.exp(x) - 1 - x for x in d) / 5
    assert loss_of(PolicyLossSettings(kl=kl), reference=reference) == pytest.approx(expected, rel=1e-6)


def test_kl_penalty_clamps_and_kills_its_gradient_there() -> None:
    logprobs = torch.tensor([[-1.0, -30.0]], requires_grad=True)
    value = penalty(logprobs, torch.tensor([[-0.5, -1.0]]), logprobs.detach(), KlPenalty(beta=1.0))
    torch.autograd.backward(value.sum())
    assert value[0, 1] == 10.0
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1] == 0
    # k3 at d = 0.5: d/dl (e^(ref - l) - 1 - (ref - l)) = 1 - e^d, plus the score term, the estimate itself.
    assert logprobs.grad[0, 0] == pytest.approx(1 - math.exp(0.5) + math.exp(0.5) - 1.5, rel=1e-5)


def test_supervised_loss_is_the_mean_over_the_global_batch() -> None:
    mask = torch.tensor(MASK, dtype=torch.bool)
    expected = -sum(NOW[row][at] for row, at in CELLS) / 5
    assert float(negative_log_likelihood(torch.tensor(NOW), mask, count(mask))) == pytest.approx(expected)


def test_an_empty_mask_gives_zero_not_nan() -> None:
    mask = torch.zeros(2, 4, dtype=torch.bool)
    assert loss_of(PolicyLossSettings(), mask=mask) == 0.0
    assert loss_of(PolicyLossSettings(token_level=False), mask=mask) == 0.0


def _metrics(settings: PolicyLossSettings) -> dict[str, float]:
    """The rows arrive as two micro-batches of two optimizer steps."""
    metrics = StepMetrics()
    for row in range(2):
        part = slice(row, row + 1)
        given = inputs()
        one = PolicyInputs(*(None if each is None else each[part] for each in given))  # type: ignore[arg-type]
        now = torch.tensor(NOW)[part]
        counts = count(one.mask)
        terms = clipped_policy_loss(now, one, counts, settings)
        metrics.add(policy_sums(now, one.generation, one.mask, terms), policy_bounds(one.mask, terms))
        metrics.add_update(float(terms.loss), row + 1.0, counts.tokens, counts.sequences)
    return metrics.result()


def mean(value: object) -> float:
    assert callable(value)
    return sum(value(NOW[r][t], OLD[r][t], GEN[r][t]) for r, t in CELLS) / 5


def test_metrics_are_token_means_over_all_optimizer_steps() -> None:
    def js(_: float, old: float, gen: float) -> float:
        middle = math.log((math.exp(old) + math.exp(gen)) / 2)
        return sum(0.5 * (math.exp(x - middle) - 1 - (x - middle)) for x in (old, gen))

    found = _metrics(PolicyLossSettings(correction=Correction(True, "tis", 0.95, 1.05)))
    expected = {
        "token_mult_prob_error": mean(lambda _, old, gen: math.exp(abs(gen - old))),
        "gen_kl_error": mean(lambda _, old, gen: math.exp(old - gen) - 1 - (old - gen)),
        "policy_kl_error": mean(lambda _, old, gen: math.exp(gen - old) - 1 - (gen - old)),
        "js_divergence_error": mean(js),
        "approx_entropy": mean(lambda now, _, gen: -math.exp(now - gen) * now),
        "probs_ratio": mean(lambda now, old, _: math.exp(now - old)),
        "probs_ratio_clamped": mean(lambda now, old, _: min(max(math.exp(now - old), 0.8), 1.2)),
        "sampling_importance_ratio_raw": mean(lambda _, old, gen: math.exp(old - gen)),
        "sampling_importance_ratio": mean(lambda _, old, gen: min(max(math.exp(old - gen), 0.95), 1.05)),
        "is_oob_ratio": mean(lambda _, old, gen: not 0.95 <= math.exp(old - gen) <= 1.05),
        "probs_ratio_min": min(math.exp(NOW[r][t] - OLD[r][t]) for r, t in CELLS),
        "probs_ratio_max": max(math.exp(NOW[r][t] - OLD[r][t]) for r, t in CELLS),
        "grad_norm": 1.5,
        "grad_norm_max": 2.0,
        "global_valid_toks": 5,
        "global_valid_seqs": 2,
        "kl_penalty": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name


def test_sequence_errors() -> None:
    errors = sequence_errors(torch.tensor(OLD), torch.tensor(GEN), torch.tensor(MASK, dtype=torch.bool))
    first = sum(math.exp(abs(GEN[0][t] - OLD[0][t])) for t in (1, 2, 3)) / 3
    second = sum(math.exp(abs(GEN[1][t] - OLD[1][t])) for t in (1, 2)) / 2
    assert errors.tolist() == pytest.approx([first, second], rel=1e-6)
