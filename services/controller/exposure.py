"""What the step loop waited for while it waited for samples.

Invariants: seconds come from the router's own count (``busy_s``: at least one turn at an engine) and from the
timing of the step's samples. Both are upper bounds of work in the wait: turns of a validation pass beside
training count, and a sample's time in its environment may lie before the wait.
"""

from __future__ import annotations

from protos.headrace.v1 import buffer_pb2, rollout_pb2
from services.controller.dispatch import TRAIN_BOOK
from services.controller.peers import Peers
from services.runtime.errors import HeadraceError

ASK_S = 5.0


class Exposure:
    """Measures one wait at a time."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._before = 0.0

    async def begin(self) -> None:
        """The wait starts."""
        self._before = await self._busy()

    async def end(self, manifest: buffer_pb2.Manifest) -> tuple[float, float]:
        """Seconds of the wait with a turn at an engine, and of the slowest sample in its environment."""
        busy = await self._busy()
        # A router that started anew counts from zero.
        spent = busy - self._before if busy >= self._before else busy
        timings = [sample.timing for group in manifest.groups for sample in group.samples]
        return spent, max((each.environment_s + each.reward_s for each in timings), default=0.0)

    async def buffered(self, run: str) -> dict[str, float]:
        """``buffer_size``: groups that are ready and wait for a step; nothing when the buffer is away."""
        try:
            progress = await self._peers.buffer.Progress(
                buffer_pb2.ProgressRequest(run=run, book=TRAIN_BOOK), timeout=ASK_S
            )
        except HeadraceError:
            return {}
        return {"buffer_size": float(progress.groups_by_state["ready"])}

    async def _busy(self) -> float:
        try:
            status = await self._peers.rollout.Status(rollout_pb2.RolloutStatusRequest(), timeout=ASK_S)
        except HeadraceError:
            return self._before
        return float(status.busy_s)
