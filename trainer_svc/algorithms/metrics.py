"""Metrics of a train step, as sums that add up over micro-batches and optimizer steps.

Invariants
- A token average is (sum over every trained token of the step) / (trained tokens of the step), whatever the
  number of micro-batches or optimizer steps; all sums are float64.
- ``loss`` and ``grad_norm`` are means over the step's optimizer steps (each one is a mean already).
- Definitions keep NeMo RL's names. With l the trainer's current, l_old its previous and l_gen the engine's
  log-probability: token_mult_prob_error = mean exp|l_gen - l_old|; gen_kl_error = KL(gen || train) and
  policy_kl_error = KL(train || gen), by k3; js_divergence_error = half the k3 of each to their mean;
  approx_entropy = -mean exp(l - l_gen) l.
- The four mismatch metrics are taken at each token's own version (the weights that sampled it), over the
  tokens where that is known; the same names with ``_raw`` compare every token with l_old.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_svc.algorithms.kl import estimate
from trainer_svc.algorithms.losses import PolicyTerms
from trainer_svc.algorithms.masked import masked_sum

LOG_2 = math.log(2.0)
Sums = dict[str, Tensor]
MISMATCH = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")


class OwnVersion(NamedTuple):
    """``logprobs`` of the tokens that an ``older`` version sampled, under it; ``judged`` tokens count.

    A judged token that is not older is of the current version, where l_old is its own. All [B, S].
    """

    logprobs: Tensor
    older: Tensor
    judged: Tensor


def mismatch_sums(previous: Tensor, generation: Tensor, mask: Tensor) -> Sums:
    """How far engine and trainer disagree on the sampled tokens; inputs [B, S], sums over ``mask``."""
    old, gen = previous.double(), generation.double()
    middle = torch.logaddexp(old, gen) - LOG_2
    js = 0.5 * estimate(old - middle, "k3") + 0.5 * estimate(gen - middle, "k3")
    return {
        "token_mult_prob_error": masked_sum(torch.exp((gen - old).abs()), mask),
        "gen_kl_error": masked_sum(estimate(old - gen, "k3"), mask),
        "policy_kl_error": masked_sum(estimate(gen - old, "k3"), mask),
        "js_divergence_error": masked_sum(js, mask),
    }


def own_version_sums(previous: Tensor, generation: Tensor, mask: Tensor, own: OwnVersion | None) -> Sums:
    """The mismatch at own version, and against ``previous`` (``_raw``); ``rescored_share`` counts the judged.

    Without ``own`` every token is of the current version, and both are the same.
    """
    raw = mismatch_sums(previous, generation, mask)
    found, judged = raw, mask
    if own is not None:
        judged = mask & own.judged
        found = mismatch_sums(torch.where(own.older, own.logprobs, previous), generation, judged)
    counted = {"rescored_share": judged.sum().double()}
    return found | {f"{name}_raw": value for name, value in raw.items()} | counted


def policy_sums(
    logprobs: Tensor, generation: Tensor, mask: Tensor, terms: PolicyTerms, own: OwnVersion | None = None
) -> Sums:
    """All token sums of the policy loss; [B, S] each."""
    current = logprobs.detach().double()
    entropy = -torch.exp(current - generation.double()) * current
    sums = own_version_sums(terms.previous, generation, mask, own)
    sums |= {
        "approx_entropy": masked_sum(entropy, mask),
        "probs_ratio": masked_sum(terms.ratio, mask),
        "probs_ratio_clamped": masked_sum(terms.clipped_ratio, mask),
        "sampling_importance_ratio": masked_sum(terms.weights.truncated, mask),
        "sampling_importance_ratio_raw": masked_sum(terms.weights.raw, mask),
        "is_oob_ratio": masked_sum(terms.weights.outside, mask),
        "kl_penalty": mask.new_zeros((), dtype=torch.float64)
        if terms.kl is None
        else masked_sum(terms.kl, mask),
    }
    return sums


def policy_bounds(mask: Tensor, terms: PolicyTerms) -> dict[str, Tensor]:
    """Smallest and largest ratio over ``mask``; empty without a trained token."""
    if not bool(mask.any()):
        return {}
    ratio, clipped = terms.ratio[mask], terms.clipped_ratio[mask]
    return {
        "probs_ratio_min": ratio.min(),
        "probs_ratio_max": ratio.max(),
        "probs_ratio_clamped_min": clipped.min(),
        "probs_ratio_clamped_max": clipped.max(),
    }


def sequence_errors(previous: Tensor, generation: Tensor, mask: Tensor) -> Tensor:
    """Mean of exp|l_gen - l_old| over a row's trained tokens: [B, S] -> [B] float64, 0 for an empty row."""
    error = torch.exp((generation.double() - previous.double()).abs())
    return torch.where(mask, error, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


class StepMetrics:
    """Adds up the micro-batches of one train step."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self._bounds: dict[str, Tensor] = {}
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._tokens = 0
        self._sequences = 0

    def add(self, sums: Sums, bounds: dict[str, Tensor] | None = None) -> None:
        """One micro-batch. Values stay on their device: reading each at once would stall a GPU."""
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in (bounds or {}).items():
            choose = torch.minimum if name.endswith("_min") else torch.maximum
            self._bounds[name] = choose(self._bounds[name], value) if name in self._bounds else value

    def add_update(self, loss: float, grad_norm: float, tokens: int, sequences: int) -> None:
        """One optimizer step: its global batch's loss, gradient norm before clipping, and counts."""
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._tokens += tokens
        self._sequences += sequences

    def result(self) -> dict[str, float]:
        """The step's metrics by name."""
        found = {
            name: float(value) / self._denominator(name)
            for name, value in self._sums.items()
            if self._denominator(name) > 0
        }
        bounds = {name: float(value) for name, value in self._bounds.items()}
        updates = max(len(self._losses), 1)
        return (
            found
            | bounds
            | {
                "loss": sum(self._losses) / updates,
                "grad_norm": sum(self._norms) / updates,
                "grad_norm_max": max(self._norms, default=0.0),
                "global_valid_toks": float(self._tokens),
                "global_valid_seqs": float(self._sequences),
            }
        )

    def _denominator(self, name: str) -> float:
        """Trained tokens; for the mismatch those of known own version: a step without any has no value."""
        if name in MISMATCH and "rescored_share" in self._sums:
            return float(self._sums["rescored_share"])
        return float(max(self._tokens, 1))
