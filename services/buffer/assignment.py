"""Which run the gym workers of a stack work for.

Invariants: it lies in Redis, so that every replica of the buffer says the same; the serial rises with every
change and only then, so that a worker that knows it knows the assignment.
"""

from __future__ import annotations

from typing import Any

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer import keys
from services.buffer.transitions import Transitions
from services.runtime.redis_errors import translated


class Assignments:
    """The assignment of the stack named ``stack``."""

    def __init__(self, transitions: Transitions, stack: str) -> None:
        self._do = transitions
        self._key = keys.assignment(stack)

    async def assign(self, gym: pb.GymAssignment) -> int:
        """Make ``gym`` the assignment; its serial. Repeating it changes nothing."""
        content = gym.SerializeToString(deterministic=True)
        reply = await self._do.call_at(self._key, "assign", gym.run, content)
        return int(reply[1])

    async def refused(self, serial: int, reason: str) -> None:
        """A worker cannot carry out assignment ``serial``; an older one is nobody's business any more."""
        await self._do.call_at(self._key, "refuse", serial, reason)

    async def refusal(self) -> str:
        """Why a worker refused the present assignment; empty when none did."""
        with translated("buffer, assignment"):
            found: Any = await self._do.redis.hget(self._key, "refusal")
        return (found or b"").decode()

    async def release(self, run: str) -> int:
        """End the assignment if it is of ``run``; the serial."""
        reply = await self._do.call_at(self._key, "release", run)
        return int(reply[1])

    async def now(self) -> pb.AssignmentResponse:
        """The assignment; without ``gym`` when there is no run."""
        with translated("buffer, assignment"):
            found: Any = await self._do.redis.hmget(self._key, "serial", "gym")
        serial, gym = found
        response = pb.AssignmentResponse(serial=int(serial or 0))
        if gym is not None:
            response.gym.ParseFromString(gym)
        return response
