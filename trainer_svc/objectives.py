"""What a micro-batch is trained for: the policy loss, or supervised likelihood."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from trainer_svc.algorithms.losses import (
    PolicyInputs,
    PolicyLossSettings,
    clipped_policy_loss,
    negative_log_likelihood,
)  # fmt: skip
from trainer_svc.algorithms.masked import Counts, masked_sum
from trainer_svc.algorithms.metrics import OwnVersion, Sums, policy_bounds, policy_sums
from trainer_svc.models.batching import MicroBatch
from trainer_svc.models.policy import TokenScores


class Outcome(NamedTuple):
    """Loss share of the global batch (with gradient), metric sums, metric bounds."""

    loss: Tensor
    sums: Sums
    bounds: dict[str, Tensor]


class Objective(Protocol):
    """Turns scores of a micro-batch into a loss."""

    def __call__(self, scores: TokenScores, micro: MicroBatch, counts: Counts) -> Outcome:
        """``counts`` are those of the global batch."""
        ...


class PolicyObjective:
    """The clipped-ratio loss and its metrics."""

    def __init__(self, settings: PolicyLossSettings) -> None:
        self._settings = settings

    def __call__(self, scores: TokenScores, micro: MicroBatch, counts: Counts) -> Outcome:
        """See :func:`trainer_svc.algorithms.losses.clipped_policy_loss`."""
        forced = self._settings.force_on_policy_ratio
        inputs = PolicyInputs(
            generation=micro["generation"],
            previous=None if forced else micro["previous"],
            reference=micro.columns.get("reference"),
            advantages=micro["advantages"],
            mask=micro["mask"],
        )
        terms = clipped_policy_loss(scores.logprobs, inputs, counts, self._settings)
        sums = policy_sums(scores.logprobs, inputs.generation, inputs.mask, terms, _own(micro))
        return Outcome(terms.loss, sums, policy_bounds(inputs.mask, terms))


def _own(micro: MicroBatch) -> OwnVersion | None:
    """What rescoring has added, if it has."""
    if "judged" not in micro.columns:
        return None
    return OwnVersion(micro["own"], micro["older"], micro["judged"])


class SupervisedObjective:
    """Negative log-likelihood of the masked tokens."""

    def __call__(self, scores: TokenScores, micro: MicroBatch, counts: Counts) -> Outcome:
        """Loss, and the share of tokens that were the likeliest."""
        loss = negative_log_likelihood(scores.logprobs, micro["mask"], counts)
        return Outcome(loss, {"token_accuracy": masked_sum(scores.correct, micro["mask"])}, {})
