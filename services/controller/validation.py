"""Validation: every row once (or k times) on one committed version, with books of its own.

Invariants
- Accuracy is the mean raw reward over the samples that ended (completed or truncated). Samples that failed
  are counted apart and never averaged in as zero.
- A pass is recorded once per step; one that a restore interrupted is dropped and runs again under a new name.
"""

from __future__ import annotations

import time
from typing import Any

from protos.headrace.v1 import buffer_pb2, types_pb2
from services.controller.data import RowFile
from services.controller.dispatch import Dispatcher, validation_sampling
from services.controller.peers import Peers, RunContext
from services.controller.store import RunStore
from services.runtime.errors import HeadraceError, TimedOut

POLL_S = 5.0


class Validator:
    """Runs validation passes of one run."""

    def __init__(
        self, ctx: RunContext, peers: Peers, store: RunStore, dispatcher: Dispatcher, rows: RowFile | None
    ) -> None:
        self._ctx = ctx
        self._peers = peers
        self._store = store
        self._dispatcher = dispatcher
        self._rows = rows

    def due(self, completed: int, *, last: bool) -> bool:
        """Whether the recipe asks for a pass after ``completed`` steps."""
        grpo = self._ctx.recipe.grpo
        if self._rows is None or self._ctx.supervised:
            return False
        if completed == 0:
            return grpo.val_at_start
        if last:
            return grpo.val_at_end
        period = grpo.val_period
        return period > 0 and completed % period == 0 and completed >= grpo.val_start_at

    async def run(self, completed: int, incarnation: int) -> dict[str, Any]:
        """One pass; returns and stores its record. A recorded pass is not run again."""
        known = (await self._store.validations(self._ctx.run)).get(completed)
        if known is not None:
            return known
        assert self._rows is not None
        began = time.monotonic()
        book = f"validation/{completed}" + (f".{incarnation}" if incarnation else "")
        await self._store.write_journal(self._ctx.run, validating=book)
        await self._store.emit(self._ctx.run, "phase", "validation", step=completed)
        samples = self._ctx.recipe.grpo.val_num_generations_per_prompt
        rows = [(i, self._rows.row(i)) for i in range(len(self._rows))]
        source = self._ctx.recipe.data.validation
        agent = source.agent if source else None
        await self._dispatcher.open(book, completed, rows, samples, validation_sampling(self._ctx), agent)
        await self._wait(book)
        closed = await self._peers.buffer.CloseBook(buffer_pb2.CloseBookRequest(run=self._ctx.run, book=book))
        record = summarise(closed, samples) | {"step": completed, "seconds": time.monotonic() - began}
        await self._store.put_validation(self._ctx.run, completed, record)
        await self._store.write_journal(self._ctx.run, validating="")
        numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}
        await self._store.emit(self._ctx.run, "validation", step=completed, values=numbers)
        return record

    async def abandon(self) -> None:
        """Drop the pass that a restore interrupted."""
        book = (await self._store.journal(self._ctx.run)).get("validating", "")
        if book:
            await self._peers.buffer.DropOpen(
                buffer_pb2.DropOpenRequest(run=self._ctx.run, book=book, reason="restored")
            )
            await self._peers.buffer.CloseBook(buffer_pb2.CloseBookRequest(run=self._ctx.run, book=book))
            await self._store.write_journal(self._ctx.run, validating="")

    async def _wait(self, book: str) -> None:
        end = time.monotonic() + self._ctx.recipe.stack.step_timeout_s
        while time.monotonic() < end:
            progress: buffer_pb2.ProgressResponse = await self._peers.buffer.Progress(
                buffer_pb2.ProgressRequest(run=self._ctx.run, book=book, wait_s=POLL_S)
            )
            if progress.samples_queued + progress.samples_claimed == 0 and progress.samples.dispatched:
                return
        raise TimedOut(
            f"Validation {book} did not end in time: {progress.samples_claimed} samples claimed, "
            f"{progress.samples_queued} queued",
            do="Look at the gym's and the engine's logs, or raise stack.step_timeout_s.",
        )


def summarise(closed: buffer_pb2.CloseBookResponse, samples: int) -> dict[str, Any]:
    """Accuracy and lengths of a closed book."""
    usable = (types_pb2.OUTCOME_COMPLETED, types_pb2.OUTCOME_TRUNCATED)
    done = [r for r in closed.results if r.outcome in usable and r.HasField("reward")]
    if not done:
        raise HeadraceError(
            "No validation sample ended with a reward", do="Look at the gym's and the reward service's logs."
        )
    by_group: dict[int, bool] = {}
    for r in done:
        by_group[r.group] = by_group.get(r.group, False) or r.reward > 0
    record: dict[str, Any] = {
        "accuracy": sum(r.reward for r in done) / len(done),
        "rows": len(by_group),
        "samples": len(done),
        "failed": int(closed.samples.dispatched) - len(done),
        "avg_length": sum(r.sampled_tokens for r in done) / len(done),
        "truncation_rate": sum(r.outcome == types_pb2.OUTCOME_TRUNCATED for r in done) / len(done),
    }
    if samples > 1:
        record["pass_k"] = sum(by_group.values()) / len(by_group)
    return record
