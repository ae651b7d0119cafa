"""What a run has reached, as its journal says and as its services say.

Invariants: ``completed`` steps are those whose update was trained, committed in the buffer and published; the
incarnation rises whenever a trainer lost its memory, so that no version number ever means other weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.headrace.v1 import types_pb2


@dataclass(slots=True)
class Progress:
    """The step loop's place."""

    completed: int = 0
    incarnation: int = 0
    # The trainer life that holds the weights; empty before the first.
    trainer: str = ""
    started: bool = False

    @classmethod
    def from_journal(cls, journal: dict[str, str]) -> Progress:
        """The place that the journal names; the beginning for an empty one."""
        return cls(
            completed=int(journal.get("completed", "0")),
            incarnation=int(journal.get("incarnation", "0")),
            trainer=journal.get("trainer", ""),
            started="trainer" in journal,
        )

    def version(self) -> types_pb2.PolicyVersion:
        """The version that ``completed`` steps make."""
        return types_pb2.PolicyVersion(incarnation=self.incarnation, number=self.completed)

    def fields(self) -> dict[str, str | int]:
        """For the journal."""
        return {"completed": self.completed, "incarnation": self.incarnation, "trainer": self.trainer}
