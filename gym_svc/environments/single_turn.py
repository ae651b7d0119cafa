"""The verifiable single-turn environment: the row is the prompt, the first answer ends the episode."""

from __future__ import annotations

from collections.abc import Sequence

from gym_svc.environments.base import Step
from gym_svc.rows import Row
from protos.headrace.v1 import types_pb2


class SingleTurn:
    """Judged by its verifier alone."""

    async def reset(self, row: Row, *, seed: int) -> Sequence[types_pb2.Message]:
        """The row's own messages."""
        return row.messages

    async def step(self, message: types_pb2.Message) -> Step:
        """The answer is final."""
        return Step(done=True)

    async def close(self) -> None:
        """Nothing is held."""
