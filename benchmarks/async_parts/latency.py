"""An environment that takes its time for every answer: a user's plugin, by dotted path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gym_svc.environments.base import Step
from gym_svc.rows import Row
from protos.headrace.v1 import types_pb2


class Latency:
    """Single-turn; answers after ``seconds``, as a tool or a judge would."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    async def reset(self, row: Row, *, seed: int) -> Sequence[types_pb2.Message]:
        """The row's own messages."""
        return row.messages

    async def step(self, message: types_pb2.Message) -> Step:
        """The answer is final, after a while."""
        await asyncio.sleep(self._seconds)
        return Step(done=True)

    async def close(self) -> None:
        """Nothing is held."""
