"""What an environment is.

Invariants
- One instance serves one episode: ``reset`` once, ``step`` after each assistant message, ``close`` always.
- Observations are new messages; an environment never edits what has been said (a prefix stays a prefix).
- A failure is raised. NotReady and TimedOut mean infrastructure, everything else the
  environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gym_svc.rows import Row
from protos.headrace.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Step:
    """Answer to one assistant message: new messages for the next turn, and whether the episode is over."""

    messages: Sequence[types_pb2.Message] = ()
    done: bool = False


class Environment(Protocol):
    """One episode."""

    async def reset(self, row: Row, *, seed: int) -> Sequence[types_pb2.Message]:
        """Begin the episode of ``row``; returns the messages of the first prompt.

        ``seed`` depends on run, group and sample and never on the attempt.
        """
        ...

    async def step(self, message: types_pb2.Message) -> Step:
        """React to the assistant's ``message``; its tool calls are those that the row allows."""
        ...

    async def close(self) -> None:
        """Release what the episode holds."""
        ...


EnvironmentFactory = Callable[[], Environment]
