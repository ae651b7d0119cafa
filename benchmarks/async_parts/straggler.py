"""An environment whose answer takes long for one sample of each batch: a user's plugin, by dotted path.

Invariants
- Which sample is slow depends on its draw alone: sample 0 of each group whose ordinal is a multiple of the
  prompts of a step. It is slow in every attempt, and for every loop that trains on it.
- Validation is never slowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from gym_svc.environments.base import Step
from gym_svc.rows import Row
from gym_svc.sample import environment_seed
from protos.headrace.v1 import buffer_pb2, types_pb2


# Hundreds of episodes a step ask for the same set.
@lru_cache
def slow_seeds(run_seed: int, every: int, groups: int) -> frozenset[int]:
    """The environment seeds of the slow samples among ``groups`` draws: all that an environment sees of
    them."""
    works = (
        buffer_pb2.Work(
            key=types_pb2.SampleKey(book="train", group=ordinal, sample=0),
            run_seed=run_seed,
        )
        for ordinal in range(0, groups, every)
    )
    return frozenset(environment_seed(work) for work in works)


class Straggler:
    """Single-turn; after the answer of a slow sample it sleeps, as a slow tool or judge would."""

    def __init__(self, *, run_seed: int, every: int, groups: int, seconds: float) -> None:
        self._slow = slow_seeds(run_seed, every, groups)
        self._seconds = seconds
        self._sleeps = False

    async def reset(self, row: Row, *, seed: int) -> Sequence[types_pb2.Message]:
        """The row's own messages."""
        self._sleeps = seed in self._slow
        return row.messages

    async def step(self, message: types_pb2.Message) -> Step:
        """The answer is final, if late."""
        if self._sleeps:
            await asyncio.sleep(self._seconds)
        return Step(done=True)

    async def close(self) -> None:
        """Nothing is held."""
