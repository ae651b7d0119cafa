"""A manifest and its trajectories become the rows of a train step.

Invariants
- Rows stand in the manifest's order, so that a replayed step sees the same batch.
- A row without a usable reward never trains at kind grpo: it is an error, not a zero.
- A token trains only if its mask is 1 and, at kind grpo, the policy sampled it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from protos.headrace.v1 import buffer_pb2, types_pb2
from services.runtime.errors import Corrupt, InvalidInput
from trainer_svc.data.columns import Array, read_columns
from trainer_svc.models.batching import TokenRows
from trainer_svc.versions import UNKNOWN, Version

Kind = Literal["grpo", "sft"]


@dataclass(slots=True)
class StepRows:
    """N rows: token columns ids (int64), mask (bool), generation (float32); per row the rest, [N].

    ``groups`` is the index of the row's group in the manifest; ``prompts`` counts tokens before the first
    trained one. ``numbers`` and ``incarnations`` (int32, over all tokens) name the version that sampled a
    token; -1 for none, and for an incarnation that the trajectory does not tell.
    """

    tokens: TokenRows
    rewards: Tensor
    groups: Tensor
    truncated: Tensor
    prompts: Tensor
    numbers: Tensor
    incarnations: Tensor

    @property
    def row_of_token(self) -> Tensor:
        """The row of each token, [total tokens]."""
        return torch.repeat_interleave(torch.arange(self.tokens.rows), self.tokens.lengths)

    def of_version(self, version: Version) -> Tensor:
        """Tokens that ``version`` sampled, [total tokens] bool."""
        return (self.numbers == version.number) & (self.incarnations == version.incarnation)


@dataclass(frozen=True, slots=True)
class _Row:
    columns: dict[str, Array]
    incarnations: Array
    group: int
    reward: float
    truncated: bool


def build_rows(
    manifest: buffer_pb2.Manifest,
    groups: Sequence[buffer_pb2.TrajectoryGroup],
    *,
    kind: Kind,
    max_length: int,
) -> StepRows:
    """The step's rows; raises Corrupt where bytes and manifest differ, InvalidInput on an empty manifest."""
    rows = list(_rows(manifest, groups, kind, max_length))
    if not rows:
        raise InvalidInput(f"The manifest of step {manifest.step} has no samples", where="Trainer.Step")
    masks = [row.columns["mask"].astype(bool) for row in rows]
    tokens = TokenRows(
        torch.tensor([len(mask) for mask in masks], dtype=torch.int64),
        {
            "ids": torch.from_numpy(np.concatenate([row.columns["ids"] for row in rows]).astype(np.int64)),
            "mask": torch.from_numpy(np.concatenate([_without_first(mask) for mask in masks])),
            "generation": torch.from_numpy(
                np.concatenate([row.columns["logprobs"] for row in rows]).astype(np.float32)
            ),
        },
    )
    return StepRows(
        tokens,
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        groups=torch.tensor([row.group for row in rows], dtype=torch.int64),
        truncated=torch.tensor([row.truncated for row in rows]),
        prompts=torch.tensor([int(mask.argmax()) if mask.any() else len(mask) for mask in masks]),
        numbers=torch.from_numpy(np.concatenate([row.columns["versions"] for row in rows])),
        incarnations=torch.from_numpy(np.concatenate([row.incarnations for row in rows])),
    )


def _rows(
    manifest: buffer_pb2.Manifest, groups: Sequence[buffer_pb2.TrajectoryGroup], kind: Kind, max_length: int
) -> Iterator[_Row]:
    for index, (wanted, found) in enumerate(zip(manifest.groups, groups, strict=True)):
        trajectories = {each.key.sample: each for each in found.trajectories}
        for sample in wanted.samples:
            where = f"group {wanted.group}, sample {sample.sample}"
            trajectory = trajectories.get(sample.sample)
            if trajectory is None:
                raise Corrupt("The buffer did not send the sample", where=where)
            yield _row(sample, trajectory, index, kind, max_length, where)


def _row(
    sample: buffer_pb2.ManifestSample,
    trajectory: types_pb2.Trajectory,
    group: int,
    kind: Kind,
    max_length: int,
    where: str,
) -> _Row:
    if trajectory.attempt != sample.attempt:
        raise Corrupt(f"Attempt {trajectory.attempt} came, not {sample.attempt}", where=where)
    if not 0 < sample.tokens <= max_length:
        raise InvalidInput(
            f"{sample.tokens} tokens do not fit policy.max_total_sequence_length {max_length}", where=where
        )
    columns = read_columns(trajectory, sample.tokens, where)
    if kind == "grpo":
        _check_sampled(columns, where)
    reward = _reward(sample, trajectory, where) if kind == "grpo" else 0.0
    return _Row(
        columns,
        _incarnations(columns["versions"], trajectory.policy_versions),
        group,
        reward,
        trajectory.outcome == types_pb2.OUTCOME_TRUNCATED,
    )


def _incarnations(numbers: Array, told: Iterable[types_pb2.PolicyVersion]) -> Array:
    """The incarnation of each token; UNKNOWN where none is told, or two for one number."""
    lives: dict[int, int] = {}
    for version in told:
        known = lives.setdefault(version.number, version.incarnation)
        lives[version.number] = known if known == version.incarnation else UNKNOWN
    found = np.full(numbers.shape, UNKNOWN, dtype=np.int32)
    for number, life in lives.items():
        found[numbers == number] = life
    return found


def _reward(sample: buffer_pb2.ManifestSample, trajectory: types_pb2.Trajectory, where: str) -> float:
    if not trajectory.HasField("reward"):
        outcome = types_pb2.Outcome.Name(trajectory.outcome)
        raise InvalidInput(f"The sample has no reward (outcome {outcome})", where=where)
    value = trajectory.reward.value
    if not np.isfinite(value):
        raise InvalidInput(f"The reward is {value}", where=where)
    if sample.HasField("reward") and sample.reward != value:
        raise Corrupt(f"The reward is {value}, the manifest says {sample.reward}", where=where)
    return value


def _check_sampled(columns: dict[str, Array], where: str) -> None:
    trained = columns["mask"].astype(bool)
    if bool((columns["versions"][trained] < 0).any()):
        raise Corrupt("A token that the policy did not sample is marked for training", where=where)
    if not bool(np.isfinite(columns["logprobs"][trained]).all()):
        raise Corrupt("A log-probability of the engine is not finite", where=where)


def _without_first(mask: Array) -> Array:
    """Position 0 has no tokens before it, hence no log-probability."""
    copy = mask.copy()
    copy[0] = False
    return copy
