"""The checks of a trajectory at append: what is stored is whole, aligned and plausible.

Invariants that hold for every trajectory that passes
- All columns cover all tokens; dtype, shape and bytes agree; ids, logprobs, versions and mask are present.
- Segments tile the sequence. Where nothing was sampled: logprob 0, version -1, and mask 0 unless supervised.
  Where something was: a finite logprob of at most 0, and a version that ``policy_versions`` names.
- The outcome is COMPLETED or TRUNCATED; it carries a reward unless the trajectory is supervised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.headrace.v1 import types_pb2 as types
from services.runtime.errors import InvalidInput

LOGPROB_SLACK = 1e-4
"""Rounding may lift the log-probability of a certain token above 0 by this much."""

WIDTHS: dict[int, int] = {
    types.DTYPE_UINT8: 1, types.DTYPE_INT8: 1, types.DTYPE_INT16: 2, types.DTYPE_INT32: 4,
    types.DTYPE_INT64: 8, types.DTYPE_FLOAT16: 2, types.DTYPE_BFLOAT16: 2, types.DTYPE_FLOAT32: 4,
    types.DTYPE_FLOAT64: 8,
}  # fmt: skip
"""Bytes of one element."""

REQUIRED: dict[str, tuple[int, str]] = {
    "ids": (types.DTYPE_INT32, "<i4"),
    "logprobs": (types.DTYPE_FLOAT32, "<f4"),
    "versions": (types.DTYPE_INT32, "<i4"),
    "mask": (types.DTYPE_UINT8, "u1"),
}

_USABLE = (types.OUTCOME_COMPLETED, types.OUTCOME_TRUNCATED)


class InvalidTrajectory(InvalidInput):
    """A trajectory that must not enter the books."""

    reason = "INVALID_TRAJECTORY"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the checks found out: counts in tokens."""

    tokens: int
    prompt_tokens: int
    sampled_tokens: int
    lowest_version: int | None
    """None for supervised data."""
    highest_version: int | None = None


def check(trajectory: types.Trajectory) -> Facts:
    """The facts of a sound trajectory; raises InvalidTrajectory with the first fault."""
    tokens = _check_columns(trajectory.columns)
    values = {
        column.name: np.frombuffer(column.data, REQUIRED[column.name][1])
        for column in trajectory.columns
        if column.name in REQUIRED
    }
    sampled = _tile(trajectory.segments, tokens)
    count = int(np.count_nonzero(sampled))
    if values["ids"].min() < 0:
        raise InvalidTrajectory("ids has a negative token id")
    _check_unsampled(values, sampled, supervised=count == 0)
    lowest, highest = _check_sampled(trajectory, values, sampled) if count else (None, None)
    _check_reward(trajectory, supervised=count == 0)
    first = trajectory.segments[0]
    prompt = first.length if first.source == types.SEGMENT_SOURCE_PROMPT else 0
    return Facts(tokens, prompt, count, lowest, highest)


def _check_columns(columns: Sequence[types.Column]) -> int:
    names = [column.name for column in columns]
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise InvalidTrajectory(f"column {', '.join(missing)} is missing")
    if len(set(names)) != len(names):
        raise InvalidTrajectory("two columns have the same name")
    tokens = {column.shape[0] if column.shape else 0 for column in columns}
    if len(tokens) != 1 or not min(tokens):
        lengths = ", ".join(f"{column.name} {list(column.shape)}" for column in columns)
        raise InvalidTrajectory(f"columns do not cover the same tokens: {lengths}")
    for column in columns:
        _check_column(column)
    return int(tokens.pop())


def _check_column(column: types.Column) -> None:
    width = WIDTHS.get(column.dtype)
    if width is None:
        raise InvalidTrajectory(f"column {column.name} has no known dtype ({column.dtype})")
    required = REQUIRED.get(column.name)
    if required and (column.dtype != required[0] or len(column.shape) != 1):
        wanted = types.DType.Name(required[0])  # type: ignore[arg-type]
        raise InvalidTrajectory(f"column {column.name} must be one {wanted} for each token")
    expected = width * math.prod(column.shape)
    if len(column.data) != expected:
        raise InvalidTrajectory(
            f"column {column.name} has {len(column.data)} bytes, its shape says {expected}"
        )


def _tile(segments: Sequence[types.Segment], tokens: int) -> NDArray[np.bool_]:
    """Which tokens were sampled, bool [tokens]."""
    sampled = np.zeros(tokens, np.bool_)
    at = 0
    for number, segment in enumerate(segments):
        if segment.start != at or not segment.length:
            raise InvalidTrajectory(f"segment {number} starts at {segment.start}, not {at}, or is empty")
        if segment.source == types.SEGMENT_SOURCE_UNSPECIFIED:
            raise InvalidTrajectory(f"segment {number} has no source")
        at += segment.length
        if segment.source == types.SEGMENT_SOURCE_SAMPLED:
            sampled[segment.start : at] = True
    if at != tokens:
        raise InvalidTrajectory(f"segments cover {at} of {tokens} tokens")
    return sampled


def _check_unsampled(
    values: dict[str, NDArray[Any]], sampled: NDArray[np.bool_], *, supervised: bool
) -> None:
    rest = ~sampled
    if np.any(values["logprobs"][rest]):
        raise InvalidTrajectory("logprobs is not 0 where nothing was sampled")
    if np.any(values["versions"][rest] != -1):
        raise InvalidTrajectory("versions is not -1 where nothing was sampled")
    mask = values["mask"]
    if np.any(mask > 1):
        raise InvalidTrajectory("mask has a value other than 0 and 1")
    if supervised and not np.any(mask):
        raise InvalidTrajectory("nothing was sampled and no token is marked to train on")
    if not supervised and np.any(mask[rest]):
        raise InvalidTrajectory("mask is not 0 where nothing was sampled")


def _check_sampled(
    trajectory: types.Trajectory, values: dict[str, NDArray[Any]], sampled: NDArray[np.bool_]
) -> tuple[int, int]:
    logprobs, versions = values["logprobs"][sampled], values["versions"][sampled]
    if not np.all(np.isfinite(logprobs)):
        raise InvalidTrajectory("a sampled token has no finite logprob")
    if np.any(logprobs > LOGPROB_SLACK):
        raise InvalidTrajectory(f"a sampled token has logprob {float(logprobs.max()):.6g}, above 0")
    lowest, highest = int(versions.min()), int(versions.max())
    if lowest < 0:
        raise InvalidTrajectory("a sampled token has no policy version")
    named = {version.number for version in trajectory.policy_versions}
    found = {lowest} if lowest == highest else set(versions.tolist())
    if not found <= named:
        raise InvalidTrajectory(
            f"tokens come from versions {sorted(found)}, policy_versions has {sorted(named)}"
        )
    return lowest, highest


def _check_reward(trajectory: types.Trajectory, *, supervised: bool) -> None:
    if trajectory.outcome not in _USABLE:
        name = types.Outcome.Name(trajectory.outcome)
        raise InvalidTrajectory(f"{name} is no outcome to append; report it with Fail")
    if not trajectory.HasField("reward"):
        if not supervised:
            raise InvalidTrajectory("a sampled trajectory needs a reward")
        return
    reward = trajectory.reward
    if not math.isfinite(reward.value):
        raise InvalidTrajectory(f"the reward is {reward.value}")
    if reward.stages and reward.stages[-1].value != reward.value:
        raise InvalidTrajectory(f"the reward is {reward.value}, its last stage {reward.stages[-1].value}")
