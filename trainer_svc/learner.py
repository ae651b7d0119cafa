"""One train step: log-probabilities, advantages, optimizer steps.

Invariants
- Gradients of an optimizer step do not depend on the split into micro-batches.
- Nothing is applied unless loss and gradient norm of that optimizer step are finite.
- ``touched`` is True from the first change of a weight in a step until the step is complete: an error in
  between leaves weights that belong to no step, and the process must not go on with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from services.runtime import tracing
from services.runtime.errors import Internal
from services.runtime.logs import get_logger
from trainer_svc.algorithms.advantages import group_advantages
from trainer_svc.algorithms.masked import Counts
from trainer_svc.algorithms.metrics import StepMetrics, sequence_errors
from trainer_svc.config import TrainerConfig
from trainer_svc.data.rows import StepRows
from trainer_svc.models.batching import MicroBatch, plan_micro_batches
from trainer_svc.models.load import build_policy, load_network, wire_dtype
from trainer_svc.models.policy import Policy
from trainer_svc.objectives import Objective, PolicyObjective, SupervisedObjective
from trainer_svc.optim import build_optimizer, build_scheduler, learning_rate
from trainer_svc.rescoring import Rescorer, oldest_token
from trainer_svc.summary import reward_metrics
from trainer_svc.versions import Version


class Learner:
    """Policy, optimizer and schedule of one run."""

    def __init__(self, config: TrainerConfig, weights: str, device: torch.device) -> None:
        """``weights``: where to load from, the base model or a checkpoint's ``model`` directory."""
        self.config = config
        self.device = device
        self.policy = self._load(weights)
        self.reference = self._load(config.model.model_name).eval() if config.loss.kl.beta else None
        self.optimizer = build_optimizer(self.policy.parameters(), config.optim)
        self.scheduler = build_scheduler(self.optimizer, config.optim)
        self.rescorer = Rescorer(self.policy, config, wire_dtype(config.model.wire_dtype))
        self.optimizer_steps = 0
        self.touched = False
        self.seconds: dict[str, float] = {}

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(each.numel() for each in self.policy.parameters() if each.requires_grad)

    def train(self, rows: StepRows, current: Version) -> dict[str, float]:
        """One RL (or supervised) step over ``rows``; returns its metrics. Raises Internal when not finite.

        ``current`` names the weights at its start.
        """
        self.seconds = {}
        metrics = StepMetrics()
        objective, extra = self._prepare(rows, current)
        rate = learning_rate(self.optimizer)
        with self._phase("training"):
            for batch in self._global_batches(rows):
                self._update(rows, batch, objective, metrics)
            if self.scheduler is not None:
                self.scheduler.step()
        self.touched = False
        lengths = rows.tokens.lengths
        return (
            metrics.result()
            | extra
            | {
                "lr": rate,
                "num_valid_samples": float(rows.tokens.rows),
                "total_num_tokens": float(lengths.sum()),
                "mean_prompt_length": float(rows.prompts.double().mean()),
            }
        )

    def _load(self, weights: str) -> Policy:
        model = self.config.model
        network = load_network(weights, model.overrides, self.device)
        return build_policy(network, precision=model.precision, chunk_tokens=model.chunk_tokens)

    def _prepare(self, rows: StepRows, current: Version) -> tuple[Objective, dict[str, float]]:
        if self.config.kind == "sft":
            return SupervisedObjective(), {}
        if self.config.overlong_filtering:
            _mask_rows(rows, rows.truncated)
        loss = self.config.loss
        threshold = self.config.error_threshold
        with self._phase("logprobs"):
            if not loss.force_on_policy_ratio or threshold is not None:
                self._log_probabilities(self.policy, "previous", rows)
            if self.reference is not None:
                self._log_probabilities(self.reference, "reference", rows)
        extra = self._mask_mismatched(rows, threshold) if threshold is not None else {}
        extra |= self._rescore(rows, current)
        advantages = group_advantages(rows.rewards, rows.groups, self.config.advantages)
        rows.tokens.columns["advantages"] = torch.repeat_interleave(advantages, rows.tokens.lengths)
        return PolicyObjective(loss), extra | reward_metrics(rows, advantages)

    def _rescore(self, rows: StepRows, current: Version) -> dict[str, float]:
        if not self.config.window:
            return {}
        with self._phase("rescoring"):
            found = self.rescorer.rescore(rows, current)
            self.rescorer.keep(current)
        return found | oldest_token(rows, current)

    @torch.no_grad()
    def _log_probabilities(self, policy: Policy, name: str, rows: StepRows) -> None:
        batch = self.config.batch
        for part in self._plan(rows, range(rows.tokens.rows), batch.logprob_rows, batch.logprob_tokens):
            micro = rows.tokens.micro(part, self.device)
            found = policy(micro["ids"], micro["mask"], self.config.model.temperature)
            rows.tokens.scatter(name, micro, found.logprobs)

    def _mask_mismatched(self, rows: StepRows, threshold: float) -> dict[str, float]:
        micro = rows.tokens.micro(torch.arange(rows.tokens.rows), torch.device("cpu"))
        errors = sequence_errors(micro["previous"], micro["generation"], micro["mask"])
        _mask_rows(rows, errors > threshold)
        return {
            "max_seq_mult_prob_error": float(errors.max()),
            "mean_seq_mult_prob_error": float(errors.mean()),
            "num_masked_seqs_by_logprob_error": float((errors > threshold).sum()),
        }

    def _global_batches(self, rows: StepRows) -> list[range]:
        size, total = self.config.batch.global_rows, rows.tokens.rows
        return [range(at, min(at + size, total)) for at in range(0, total, size)]

    def _plan(
        self, rows: StepRows, part: Sequence[int], max_rows: int, max_tokens: int | None
    ) -> list[Tensor]:
        lengths = rows.tokens.lengths.tolist()
        return plan_micro_batches(lengths, part, max_rows=max_rows, max_tokens=max_tokens)

    def _update(self, rows: StepRows, part: range, objective: Objective, metrics: StepMetrics) -> None:
        """One optimizer step over the rows ``part``."""
        batch = self.config.batch
        planned = self._plan(rows, part, batch.micro_rows, batch.micro_tokens)
        micros = [rows.tokens.micro(each, self.device) for each in planned]
        counts = _counts(micros)
        if not counts.tokens:
            get_logger("trainer").warning("a global batch has no token to train on", rows=len(part))
            return
        loss = 0.0
        for micro in micros:
            if bool(micro["mask"].any()):
                loss += self._backward(micro, objective, counts, metrics)
        norm = self._apply(loss)
        metrics.add_update(loss, norm, counts.tokens, counts.sequences)

    def _backward(
        self, micro: MicroBatch, objective: Objective, counts: Counts, metrics: StepMetrics
    ) -> float:
        scores = self.policy(micro["ids"], micro["mask"], self.config.model.temperature)
        loss, sums, bounds = objective(scores, micro, counts)
        torch.autograd.backward(loss)
        metrics.add(sums, bounds)
        return float(loss.detach())

    def _apply(self, loss: float) -> float:
        """Clip, check and step; returns the gradient norm before clipping."""
        limit = self.config.optim.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit or math.inf))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise Internal(
                f"Loss {loss} or gradient norm {norm} is not finite; nothing was applied",
                where="optimizer step",
                do="Lower the learning rate, or resume from an earlier checkpoint.",
                reason="NOT_FINITE",
            )
        self.touched = True
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return norm

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A child span of the step whose seconds are told in the step's result."""
        started = time.monotonic()
        with tracing.span(f"train.{name}"):
            yield
        self.seconds[name] = time.monotonic() - started


def _counts(micros: Sequence[MicroBatch]) -> Counts:
    masks = [micro["mask"] for micro in micros]
    return Counts(
        tokens=sum(int(mask.sum()) for mask in masks),
        sequences=sum(int(mask.any(dim=1).sum()) for mask in masks),
    )


def _mask_rows(rows: StepRows, drop: Tensor) -> None:
    """Take the rows ``drop`` [N] bool out of training; they keep their place in baselines."""
    kept = ~torch.repeat_interleave(drop, rows.tokens.lengths)
    rows.tokens.columns["mask"] = rows.tokens.columns["mask"] & kept
