"""Following the stack's assignment: which run to work for.

Invariants
- An assignment is acted on once. One that cannot be carried out is refused with the reason, so that the run
  ends with it instead of waiting for nobody.
- The buffer's absence changes nothing: the worker goes on with what it knows and asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc
from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.logs import get_logger
from services.runtime.retry import backoff

WAIT_S = 5.0
MARGIN_S = 5.0
Change = Callable[[buffer_pb2.GymAssignment | None], Awaitable[None]]


class Follower:
    """Asks ``stub`` for the assignment and hands each change to ``change`` (None: there is no run)."""

    def __init__(self, stub: buffer_pb2_grpc.BufferAsyncStub, change: Change) -> None:
        self._stub = stub
        self._change = change
        self._known = 0
        self._refusal = ""
        self._log = get_logger("gym")

    async def forever(self) -> None:
        """Follow until cancelled."""
        failures = 0
        while True:
            try:
                await self._once()
                failures = 0
            except HeadraceError as exc:
                if failures == 0:
                    self._log.warning("no assignment", error=str(exc))
                failures += 1
                await asyncio.sleep(max(0.1, backoff(failures)))

    async def _once(self) -> None:
        request = buffer_pb2.AssignmentRequest(known_serial=self._known, wait_s=WAIT_S, refusal=self._refusal)
        answer: buffer_pb2.AssignmentResponse = await self._stub.Assignment(
            request, timeout=WAIT_S + MARGIN_S
        )
        if answer.serial == self._known:
            return
        self._refusal = ""
        try:
            await self._change(answer.gym if answer.HasField("gym") else None)
        except InvalidInput as exc:
            self._log.error("cannot work for the run", error=str(exc))
            self._refusal = str(exc)
        self._known = answer.serial
