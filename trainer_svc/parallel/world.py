"""Which rank of the torchrun job this process is.

Invariants: rank 0 alone serves gRPC and talks to the buffer. The job has one rank today: more are refused at
the start, because rows, gradients and checkpoints are not yet shared between ranks (rank 0 will broadcast
each command and its micro-batch plan; the others wait on the rendezvous store).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from services.runtime.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class World:
    """Ranks as torchrun numbers them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> World:
        """What torchrun put into the environment; one rank without it."""
        return cls(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)))


def check_size(ranks: int) -> None:
    """Raise InvalidInput unless the job has one rank."""
    if ranks != 1:
        raise InvalidInput(
            f"{ranks} trainer ranks are not supported yet",
            where="HEADRACE_TRAINER_NPROC",
            do="Set it to 1.",
            reason="NOT_BUILT",
        )
