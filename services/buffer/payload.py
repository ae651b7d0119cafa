"""How a trajectory lies in Redis: checked at append, without the prompt that its group stores once.

Invariants: ``unpack(pack(t, prompt), prompt)`` equals ``t``, its columns byte for byte; a prompt is left out
only where it can be put back exactly, so a sample whose prompt differs from the group's keeps its own, and
only where it is worth it: a long answer keeps its short prompt, and is then handed on without being parsed.

Format: 4 bytes, little-endian: prompt tokens left out; then the serialised Trajectory whose required columns
start behind them (shapes stay those of the whole sequence).
"""

from __future__ import annotations

import struct

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.columns import Facts, InvalidTrajectory, check
from services.runtime.errors import Corrupt

__all__ = [
    "InvalidTrajectory",
    "check",
    "manifest_sample",
    "pack",
    "prompt_of",
    "sample_result",
    "serialised",
    "unpack",
]

_HEAD = struct.Struct("<I")
WORTH = 1 / 8
# What a required column holds on prompt tokens, by token; ids is the prompt itself.
_FILL = {"logprobs": b"\0\0\0\0", "versions": b"\xff\xff\xff\xff", "mask": b"\0"}


def prompt_of(trajectory: types.Trajectory, facts: Facts) -> bytes:
    """Token ids of the leading prompt, int32 little-endian; empty when there is none."""
    return _column(trajectory, "ids").data[: 4 * facts.prompt_tokens]


def pack(trajectory: types.Trajectory, prompt: bytes) -> bytes:
    """The payload of ``trajectory``, which loses its prompt in the process (it is not usable afterwards)."""
    if not prompt or _is_small(prompt, trajectory) or not _leads(trajectory, prompt):
        return _HEAD.pack(0) + trajectory.SerializeToString()
    for column in trajectory.columns:
        lead = _lead(column.name, prompt)
        if lead is not None:
            column.data = column.data[len(lead) :]
    return _HEAD.pack(len(prompt) // 4) + trajectory.SerializeToString()


def unpack(payload: bytes, prompt: bytes | None) -> types.Trajectory:
    """The whole trajectory; raises Corrupt when its group's prompt is not the one that was left out."""
    (left_out,) = _HEAD.unpack_from(payload)
    trajectory = types.Trajectory.FromString(payload[_HEAD.size :])
    if not left_out:
        return trajectory
    if prompt is None or len(prompt) != 4 * left_out:
        raise Corrupt(
            f"The prompt of group {trajectory.key.group} is not the one of its samples", where="buffer"
        )
    for column in trajectory.columns:
        lead = _lead(column.name, prompt)
        if lead is not None:
            column.data = lead + column.data
    return trajectory


def serialised(payload: bytes, prompt: bytes | None) -> bytes | memoryview:
    """The whole trajectory as it goes over the wire; raises Corrupt as :func:`unpack` does."""
    (left_out,) = _HEAD.unpack_from(payload)
    return unpack(payload, prompt).SerializeToString() if left_out else memoryview(payload)[_HEAD.size :]


def manifest_sample(trajectory: types.Trajectory, facts: Facts) -> pb.ManifestSample:
    """What a manifest says about the sample, without its trace (that is the dispatch's)."""
    found = pb.ManifestSample(
        sample=trajectory.key.sample,
        attempt=trajectory.attempt,
        tokens=facts.tokens,
        sampled_tokens=facts.sampled_tokens,
        outcome=trajectory.outcome,
    )
    if trajectory.HasField("reward"):
        found.reward = trajectory.reward.value
    if facts.lowest_version is not None:
        found.version = facts.lowest_version
    if facts.highest_version is not None:
        found.highest_version = facts.highest_version
    if trajectory.HasField("timing"):
        found.timing.CopyFrom(trajectory.timing)
    return found


def sample_result(trajectory: types.Trajectory, facts: Facts) -> pb.SampleResult:
    """What stays of a sample when its book is closed."""
    found = pb.SampleResult(
        group=trajectory.key.group,
        sample=trajectory.key.sample,
        outcome=trajectory.outcome,
        tokens=facts.tokens,
        sampled_tokens=facts.sampled_tokens,
        finish_reason=trajectory.finish_reason,
        turns=trajectory.turns,
        timing=trajectory.timing,
        environment=trajectory.environment,
    )
    if trajectory.HasField("reward"):
        found.reward = trajectory.reward.value
    return found


def _is_small(prompt: bytes, trajectory: types.Trajectory) -> bool:
    """Whether leaving the prompt out would save less than ``WORTH`` of the sequence."""
    return len(prompt) < WORTH * len(_column(trajectory, "ids").data)


def _column(trajectory: types.Trajectory, name: str) -> types.Column:
    return next(column for column in trajectory.columns if column.name == name)


def _lead(name: str, prompt: bytes) -> bytes | None:
    if name == "ids":
        return prompt
    fill = _FILL.get(name)
    return None if fill is None else fill * (len(prompt) // 4)


def _leads(trajectory: types.Trajectory, prompt: bytes) -> bool:
    return all(
        lead is None or column.data.startswith(lead)
        for column in trajectory.columns
        for lead in (_lead(column.name, prompt),)
    )
