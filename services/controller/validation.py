"""Validation: every row once (or k times) on one committed version, with books of its own.

Invariants
- Accuracy is the mean raw reward over the samples that ended (completed or truncated). Samples that failed
  are counted apart and never averaged in as zero.
- One version answers a whole pass. Where engines can be spared the pass leases them and runs beside training;
  a lease that changes under it voids the pass. Else the step loop waits for the pass.
- One pass at a time, recorded once per step. One that was interrupted is dropped, and runs again on the
  version that is committed when the loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from protos.headrace.v1 import buffer_pb2, refit_pb2, types_pb2
from services.controller.data import RowFile
from services.controller.dispatch import Dispatcher, validation_sampling
from services.controller.peers import Peers, RunContext
from services.controller.store import RunStore
from services.runtime.errors import HeadraceError, NotReady, TimedOut
from services.runtime.logs import get_logger

log = get_logger("controller")

POLL_S = 5.0
LEASED_TRIES = 2
"""Passes beside training that may lose their engines before the pass is due again after a later step."""


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
        self._beside: asyncio.Task[None] | None = None
        self._again = False
        self._dropped = 0

    def due(self, completed: int, *, last: bool) -> bool:
        """Whether the recipe asks for a pass after ``completed`` steps."""
        grpo = self._ctx.recipe.grpo
        if self._rows is None or self._ctx.supervised:
            return False
        if self._again:
            return True
        if completed == 0:
            return grpo.val_at_start
        if last:
            return grpo.val_at_end
        period = grpo.val_period
        return period > 0 and completed % period == 0 and completed >= grpo.val_start_at

    async def validate(self, completed: int, incarnation: int, *, last: bool) -> None:
        """The pass of ``completed``: beside training where engines can be spared, else to its end."""
        await self.finish()
        if completed in await self._store.validations(self._ctx.run):
            self._again = False
            return
        book = f"validation/{completed}" + (f".{incarnation}" if incarnation else "")
        if self._again:
            book += f".again-{self._ctx.epoch}-{self._dropped}"
        # At the end of the run there is no training to spare engines from.
        lease = None if last else await self._lease(book, completed)
        if lease is None:
            await self._pass(book, completed)
            return
        self._beside = asyncio.create_task(self._pass_beside(book, completed, lease))

    def check(self) -> None:
        """Raise what a pass beside training has failed with."""
        if self._beside is not None and self._beside.done():
            task, self._beside = self._beside, None
            task.result()

    async def finish(self) -> None:
        """Wait for the pass beside training, if there is one; raises what it failed with."""
        if self._beside is not None:
            await asyncio.wait((self._beside,))
            self.check()

    async def conclude(self, completed: int, incarnation: int) -> None:
        """The end of training: wait for the pass beside it, and make up for one that lost its engines."""
        await self.finish()
        if self._again:
            await self.validate(completed, incarnation, last=True)

    async def interrupt(self) -> None:
        """End the pass beside training: this life of the loop is over."""
        if self._beside is None:
            return
        task, self._beside = self._beside, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def settle(self, completed: int, *, restored: bool) -> None:
        """What becomes of a pass that the end of a life interrupted.

        One that the loop waited for goes on where its version is still the committed one; any other is
        dropped, and due again.
        """
        journal = await self._store.journal(self._ctx.run)
        book = journal.get("validating", "")
        same = not restored and journal.get("validating_for") == str(completed)
        if book and not same:
            await self._drop(book, "restored" if restored else "interrupted")
            self._again = True

    async def _pass_beside(self, book: str, completed: int, lease: list[str]) -> None:
        """A pass on leased engines; one that loses them starts again on others, or is due again."""
        name = book
        try:
            for number in range(LEASED_TRIES):
                if number:
                    name = f"{book}.{number + 1}"
                    lease = await self._lease(name, completed) or []
                if lease and await self._pass(name, completed, lease):
                    return
                await self._give_back(name)
            self._again = True
        finally:
            await self._give_back(name)

    async def _pass(self, book: str, completed: int, lease: list[str] | None = None) -> bool:
        """One pass; False when its engines changed under it, and nothing was recorded."""
        assert self._rows is not None
        began = time.monotonic()
        waiting = "" if lease else str(completed)
        await self._store.write_journal(self._ctx.run, validating=book, validating_for=waiting)
        await self._store.emit(self._ctx.run, "phase", "validation", step=completed)
        samples = self._ctx.recipe.grpo.val_num_generations_per_prompt
        rows = [(i, self._rows.row(i)) for i in range(len(self._rows))]
        source = self._ctx.recipe.data.validation
        agent = source.agent if source else None
        await self._dispatcher.open(book, completed, rows, samples, validation_sampling(self._ctx), agent)
        if not await self._wait(book, completed, lease):
            await self._drop(book, "engines_lost")
            return False
        closed = await self._peers.buffer.CloseBook(buffer_pb2.CloseBookRequest(run=self._ctx.run, book=book))
        record = summarise(closed, samples) | {"step": completed, "seconds": time.monotonic() - began}
        record["beside_training"] = lease is not None
        await self._store.put_validation(self._ctx.run, completed, record)
        await self._store.write_journal(self._ctx.run, validating="")
        self._again = False
        numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}
        await self._store.emit(self._ctx.run, "validation", step=completed, values=numbers)
        return True

    async def _drop(self, book: str, reason: str) -> None:
        self._dropped += 1
        request = buffer_pb2.DropOpenRequest(run=self._ctx.run, book=book, reason=reason)
        await self._peers.buffer.DropOpen(request)
        await self._peers.buffer.CloseBook(buffer_pb2.CloseBookRequest(run=self._ctx.run, book=book))
        await self._store.write_journal(self._ctx.run, validating="")

    async def _lease(self, book: str, completed: int) -> list[str] | None:
        """Engines set aside for ``book`` at the version of ``completed``; None when none can be spared."""
        request = refit_pb2.LeaseEnginesRequest(
            run=self._ctx.run, fence=self._ctx.fence(completed), book=book,
            engines=self._ctx.recipe.stack.validation_engines,
        )  # fmt: skip
        answer: refit_pb2.LeaseEnginesResponse = await self._peers.refit.LeaseEngines(request)
        if not answer.engines:
            return None
        if answer.version.number == completed:
            return sorted(answer.engines)
        await self._give_back(book)
        return None

    async def _give_back(self, book: str) -> None:
        request = refit_pb2.ReleaseEnginesRequest(run=self._ctx.run, book=book)
        try:
            await self._peers.refit.ReleaseEngines(request, timeout=5)
        except HeadraceError as exc:
            # The bridge ends a lease by itself when the next life of this loop sets it up.
            log.warning("validation engines were not given back", book=book, error=str(exc))

    async def _still(self, book: str, completed: int, lease: list[str] | None) -> bool:
        """Whether the pass has the engines that it began with."""
        if lease is None:
            return True
        try:
            return await self._lease(book, completed) == lease
        except NotReady as exc:
            log.warning("the lease cannot be checked", book=book, error=str(exc))
            return False

    async def _wait(self, book: str, completed: int, lease: list[str] | None) -> bool:
        end = time.monotonic() + self._ctx.recipe.stack.step_timeout_s
        while time.monotonic() < end:
            progress: buffer_pb2.ProgressResponse = await self._peers.buffer.Progress(
                buffer_pb2.ProgressRequest(run=self._ctx.run, book=book, wait_s=POLL_S)
            )
            # Asked after each look: engines that are there after the last answer were there all along.
            if not await self._still(book, completed, lease):
                return False
            if progress.samples_queued + progress.samples_claimed == 0 and progress.samples.dispatched:
                return True
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
