"""Builds the trajectory of one sample, turn by turn.

Invariants
- Segments tile the sequence; every column has one entry for each token.
- Tokens that nobody sampled have log-probability 0, version -1 and mask 0.
- ``ids`` is exactly what the engine rendered and sampled: nothing is re-tokenised, so that the ids after a
  turn are a prefix of the ids after the next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protos.headrace.v1 import buffer_pb2, rollout_pb2, types_pb2
from services.runtime.errors import Corrupt

_NO_VERSION = np.int32(-1).tobytes()
_SAMPLED = types_pb2.SEGMENT_SOURCE_SAMPLED


@dataclass(slots=True)
class Clock:
    """Seconds of one sample by phase; ``started_ns`` is Unix time."""

    queued_s: float
    started_ns: int
    generation_s: float = 0.0
    environment_s: float = 0.0
    reward_s: float = 0.0

    @classmethod
    def start(cls, work: buffer_pb2.Work) -> Clock:
        """The clock of a sample that has just been claimed."""
        now = time.time_ns()
        queued = (now - work.queued_ns) / 1e9 if work.queued_ns else 0.0
        return cls(queued_s=max(0.0, queued), started_ns=now)

    def timing(self) -> types_pb2.SampleTiming:
        """The proto; the sample ends now."""
        return types_pb2.SampleTiming(
            queued_s=self.queued_s, generation_s=self.generation_s, environment_s=self.environment_s,
            reward_s=self.reward_s, started_ns=self.started_ns, ended_ns=time.time_ns(),
        )  # fmt: skip


@dataclass(slots=True)
class Tokens:
    """The token columns so far."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    versions: bytearray = field(default_factory=bytearray)
    mask: bytearray = field(default_factory=bytearray)
    segments: list[types_pb2.Segment] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.mask)

    def add_turn(self, turn: int, answer: rollout_pb2.TurnResponse) -> None:
        """Append what one turn rendered and sampled; raises Corrupt when its columns do not fit."""
        sampled = _sampled_tokens(answer)
        source = types_pb2.SEGMENT_SOURCE_ENVIRONMENT if turn else types_pb2.SEGMENT_SOURCE_PROMPT
        self._add_rendered(turn, source, answer.rendered_ids)
        self._segment(_SAMPLED, sampled, turn)
        self.ids += answer.sampled_ids
        self.logprobs += answer.logprobs
        self.versions += answer.versions
        self.mask += b"\x01" * sampled

    def add_supervised(self, rendered: rollout_pb2.Rendered) -> None:
        """Append a rendered conversation with its mask; raises Corrupt when the parts do not fit."""
        tokens = _count(rendered.ids, 4, "ids")
        at = 0
        for segment in rendered.segments:
            if segment.start != at or segment.length == 0:
                raise Corrupt(
                    "The segments of a rendered conversation do not tile it", where="Rollout.Render"
                )
            at += segment.length
        if at != tokens or len(rendered.mask) != tokens:
            text = f"{tokens} ids, {len(rendered.mask)} mask entries, segments of {at}"
            raise Corrupt(f"A rendered conversation does not fit: {text}", where="Rollout.Render")
        self.segments.extend(_unsampled_segment(segment) for segment in rendered.segments)
        self._unsampled(rendered.ids, tokens)
        self.mask += rendered.mask

    def _add_rendered(self, turn: int, source: types_pb2.SegmentSource.ValueType, ids: bytes) -> None:
        tokens = _count(ids, 4, "rendered_ids")
        self._segment(source, tokens, turn)
        self._unsampled(ids, tokens)
        self.mask += bytes(tokens)

    def _unsampled(self, ids: bytes, tokens: int) -> None:
        self.ids += ids
        self.logprobs += bytes(4 * tokens)
        self.versions += _NO_VERSION * tokens

    def _segment(self, source: types_pb2.SegmentSource.ValueType, length: int, turn: int) -> None:
        if length:
            self.segments.append(
                types_pb2.Segment(source=source, start=len(self.mask), length=length, turn=turn)
            )

    def columns(self) -> list[types_pb2.Column]:
        """ids, logprobs, versions and mask."""
        kinds: Sequence[tuple[str, types_pb2.DType.ValueType, bytearray]] = (
            ("ids", types_pb2.DTYPE_INT32, self.ids),
            ("logprobs", types_pb2.DTYPE_FLOAT32, self.logprobs),
            ("versions", types_pb2.DTYPE_INT32, self.versions),
            ("mask", types_pb2.DTYPE_UINT8, self.mask),
        )
        shape = [len(self.mask)]
        return [
            types_pb2.Column(name=name, dtype=dtype, shape=shape, data=bytes(data))
            for name, dtype, data in kinds
        ]


def column(trajectory: types_pb2.Trajectory, name: str) -> npt.NDArray[np.generic]:
    """A column of ``trajectory`` as an array (a view)."""
    dtypes = {types_pb2.DTYPE_INT32: "<i4", types_pb2.DTYPE_FLOAT32: "<f4", types_pb2.DTYPE_UINT8: "u1"}
    found = next(item for item in trajectory.columns if item.name == name)
    return np.frombuffer(found.data, dtype=dtypes[found.dtype]).reshape(tuple(found.shape))


def _unsampled_segment(segment: types_pb2.Segment) -> types_pb2.Segment:
    """A rendered segment; what the assistant says there is data, and no policy has sampled it."""
    found = types_pb2.Segment()
    found.CopyFrom(segment)
    if found.source == _SAMPLED:
        found.source = types_pb2.SEGMENT_SOURCE_ENVIRONMENT
    return found


def _sampled_tokens(answer: rollout_pb2.TurnResponse) -> int:
    count = _count(answer.sampled_ids, 4, "sampled_ids")
    if len(answer.logprobs) != 4 * count or len(answer.versions) != 4 * count:
        raise Corrupt(f"A turn's columns differ in length (ids: {count} tokens)", where="Rollout.Turn")
    if not np.isfinite(np.frombuffer(answer.logprobs, dtype="<f4")).all():
        raise Corrupt("A sampled token has a log-probability that is not finite", where="Rollout.Turn")
    return count


def _count(data: bytes, size: int, name: str) -> int:
    count, rest = divmod(len(data), size)
    if rest:
        raise Corrupt(f"{name} has {len(data)} bytes, no multiple of {size}", where="Rollout")
    return count
