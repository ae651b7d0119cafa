"""Scores trained tokens under the version that sampled each of them.

Invariants
- A token's own version is (incarnation, number). Tokens of the current version need no second pass; tokens of
  a version that is not held (undone by a restore, or older than W) are left out and counted.
- A row with tokens of several versions is scored once under each; every token takes its own.
- What trains does not depend on any of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_svc.config import TrainerConfig
from trainer_svc.data.rows import StepRows
from trainer_svc.models.batching import plan_micro_batches
from trainer_svc.models.policy import Policy
from trainer_svc.models.snapshots import Snapshots
from trainer_svc.versions import Version


class Rescorer:
    """Adds the columns ``own`` (log-probability at an older own version, float32), ``older`` (where it is
    that) and ``judged`` (tokens that count in the metrics at own version)."""

    def __init__(self, policy: Policy, config: TrainerConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._device = policy.device
        window = config.window if config.rescore_samples != 0 else 0
        self._snapshots = Snapshots(policy, dtype, window) if window else None

    @property
    def versions(self) -> list[Version]:
        """The versions that can be scored besides the current one."""
        return self._snapshots.versions if self._snapshots is not None else []

    def keep(self, current: Version) -> None:
        """The weights are ``current`` and are about to change."""
        if self._snapshots is not None:
            self._snapshots.keep(current)

    def forget(self) -> None:
        """Another incarnation has begun."""
        if self._snapshots is not None:
            self._snapshots.forget()

    def rescore(self, rows: StepRows, current: Version) -> dict[str, float]:
        """Add the columns for a step that begins with the weights ``current``; returns counts and ages."""
        columns, mask = rows.tokens.columns, rows.tokens.columns["mask"]
        chosen = torch.repeat_interleave(self._chosen(rows), rows.tokens.lengths)
        now = rows.of_version(current)
        columns["own"] = torch.zeros(mask.shape, dtype=torch.float32)
        columns["older"] = torch.zeros_like(mask)
        for version in self.versions:
            self._score(rows, version, mask & chosen & rows.of_version(version))
        columns["judged"] = columns["older"] | (now & chosen)
        unheld = mask & ~now
        for version in self.versions:
            unheld &= ~rows.of_version(version)
        return {
            "rescored_tokens": float(columns["older"].sum()),
            "unheld_version_tokens": float(unheld.sum()),
        }

    def _chosen(self, rows: StepRows) -> Tensor:
        """Which rows are looked at [N]: evenly spread over the step, so over its groups."""
        count, wanted = rows.tokens.rows, self._config.rescore_samples
        if not wanted or wanted >= count:
            return torch.ones(count, dtype=torch.bool)
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[torch.arange(wanted) * count // wanted] = True
        return chosen

    def _score(self, rows: StepRows, version: Version, wanted: Tensor) -> None:
        """Score the tokens ``wanted`` [all tokens] under ``version``."""
        tokens, batch = rows.tokens, self._config.batch
        part = torch.unique(rows.row_of_token[wanted]).tolist()
        if not part or self._snapshots is None:
            return
        score = self._snapshots.scorer(version)
        tokens.columns["wanted"] = wanted
        lengths = tokens.lengths.tolist()
        for each in plan_micro_batches(
            lengths, part, max_rows=batch.logprob_rows, max_tokens=batch.logprob_tokens
        ):
            micro = tokens.micro(each, self._device)
            found = score(micro["ids"], micro["wanted"], self._config.model.temperature).logprobs
            tokens.scatter("own", micro, torch.where(micro["wanted"], found, micro["own"]))
        del tokens.columns["wanted"]
        tokens.columns["older"] |= wanted


def oldest_token(rows: StepRows, current: Version) -> dict[str, float]:
    """``token_age_max``: how many versions behind ``current`` the oldest trained token is."""
    numbers = rows.numbers[rows.tokens.columns["mask"]]
    return {"token_age_max": float(current.number - numbers.min())} if numbers.numel() else {}
