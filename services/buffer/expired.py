"""A claim that its worker gave up, as the reclaim script tells it.

Invariants: each has a span ``buffer.reclaim`` in the trace of its sample. A worker that died wrote no span of
its own, so this one says why the trace has a later attempt, or ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from protos.headrace.v1 import types_pb2 as types
from services.runtime import tracing


@dataclass(frozen=True, slots=True)
class Expired:
    """One claim taken back."""

    book: str
    group: int
    sample: int
    attempt: int
    retried: bool
    """It is queued again; False: its group was given up."""
    traceparent: str

    @classmethod
    def read(cls, facts: bytes, context: bytes) -> Self:
        """From the script's two elements."""
        book, group, sample, attempt, decision = facts.decode().split(" ")
        traceparent = types.TraceContext.FromString(context).traceparent
        return cls(book, int(group), int(sample), int(attempt), decision == "retry", traceparent)

    def trace(self, run: str) -> None:
        """Leave a span in the sample's trace."""
        attributes: dict[str, str | int] = {
            "headrace.run": run, "headrace.book": self.book, "headrace.group": str(self.group),
            "headrace.sample": str(self.sample), "headrace.attempt": self.attempt,
            "headrace.decision": "retry" if self.retried else "dropped",
        }  # fmt: skip
        parent = tracing.context_from(self.traceparent)
        with tracing.span("buffer.reclaim", parent=parent, attributes=attributes) as span:
            span.add_event("claim expired", {"headrace.attempt": self.attempt})
