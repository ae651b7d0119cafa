"""One active run at a time; the others wait in the order of their submission.

Invariants
- A run is driven only under its lease; losing the lease stops the loop at once and changes nothing more.
- Whatever ends a run, its ledger and summary are sealed first and its status is written last: a crash in
  between ends it again, and whoever sees the end finds the record complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import redis as redis_py

from protos.headrace.v1 import buffer_pb2, refit_pb2, runs_pb2
from services.buffer.retire import expire_books
from services.controller import summary
from services.controller.data import Draws, RowFile
from services.controller.dispatch import TRAIN_BOOK, Dispatcher
from services.controller.loop import StepLoop
from services.controller.pausing import PauseSwitch
from services.controller.peers import Peers, RunContext
from services.controller.progress import Progress
from services.controller.settings import ControllerSettings
from services.controller.store import LEASE_MS, RunStore, status_name
from services.controller.validation import Validator
from services.recipe import Recipe
from services.runtime.errors import Fenced, HeadraceError, InvalidInput, Refused
from services.runtime.home import Home
from services.runtime.logs import bind_ids, get_logger

log = get_logger("controller")

IDLE_S = 0.25


class Scheduler:
    """Takes up this stack's runs, one after the other."""

    def __init__(self, settings: ControllerSettings, client: Any) -> None:
        self._settings = settings
        self._client = client
        self.store = RunStore(client)
        self._holder = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._active: tuple[str, asyncio.Task[None]] | None = None
        self._switch = PauseSwitch()
        self._peers: Peers | None = None

    async def forever(self) -> None:
        """Drive runs until cancelled."""
        self._peers = Peers(self._settings)
        while True:
            try:
                run = await self.store.pending(self._settings.stack)
                epoch = await self.store.acquire(run, self._holder) if run else None
            except (HeadraceError, redis_py.RedisError) as exc:
                log.warning("the store does not answer", error=str(exc))
                run, epoch = None, None
            if run is None or epoch is None:
                await asyncio.sleep(IDLE_S)
                continue
            with bind_ids(run=run):
                await self._attempt(run, epoch)

    async def cancel(self, run: str, reason: str) -> None:
        """End ``run``; a queued one ends without having started."""
        message = await self.store.get(run)
        if message.ended_ns:
            return
        await self.store.update(run, cancel=reason or "cancelled")
        if self._active is not None and self._active[0] == run:
            self._active[1].cancel()
        else:
            await self._end(run, runs_pb2.RUN_STATUS_CANCELLED, reason or "cancelled")

    def drives(self, run: str) -> bool:
        """Whether this process has ``run`` in hand at this moment."""
        return self._active is not None and self._active[0] == run

    async def pause(self, run: str) -> None:
        """Hold ``run`` before its next step; a queued one is not taken up."""
        message = await self.store.get(run)
        if message.ended_ns:
            raise Refused(f"{run} has ended", do="Start a new run.")
        # The switch first: a run that is just starting looks at it before it says that it runs.
        if self.drives(run):
            self._switch.pause()
        await self.store.update(run, paused=1, status=runs_pb2.RUN_STATUS_PAUSED)
        if message.status != runs_pb2.RUN_STATUS_PAUSED:
            await self.store.emit(run, "status", "paused")

    async def resume(self, run: str) -> None:
        """Let a paused run go on; another one is left as it is."""
        message = await self.store.get(run)
        if message.status != runs_pb2.RUN_STATUS_PAUSED:
            return
        active = self.drives(run)
        status = runs_pb2.RUN_STATUS_RUNNING if active else runs_pb2.RUN_STATUS_QUEUED
        await self.store.update(run, paused="", status=status)
        if active:
            self._switch.resume()
        await self.store.emit(run, "status", "resumed")

    async def _attempt(self, run: str, epoch: int) -> None:
        """Drive ``run``; without its store nothing can be said of it, so it is taken up again later."""
        try:
            await self._drive(run, epoch)
        except redis_py.RedisError as exc:
            log.warning("the store went away under the run", error=str(exc))
            await asyncio.sleep(IDLE_S)

    async def _drive(self, run: str, epoch: int) -> None:
        self._switch = PauseSwitch(paused=bool((await self.store.fields(run)).get("paused")))
        task = asyncio.create_task(self._run(run, epoch))
        renew = asyncio.create_task(self._renew(run, epoch, task))
        self._active = (run, task)
        try:
            # Not `await task`: a cancel of this process must not be taken for the run's own end.
            await asyncio.wait((task,))
            await self._settle(run, task)
        finally:
            self._active = None
            for pending in (renew, task):
                pending.cancel()
            await asyncio.gather(renew, task, return_exceptions=True)
            await self._give_back(run)

    async def _settle(self, run: str, task: asyncio.Task[None]) -> None:
        """Write how the run ended; a lost lease or a newer controller leaves it as it is."""
        error = None if task.cancelled() else task.exception()
        reason = (await self.store.fields(run)).get("cancel")
        if reason and (task.cancelled() or error is not None):
            await self._end(run, runs_pb2.RUN_STATUS_CANCELLED, reason)
        elif task.cancelled() or isinstance(error, Fenced):
            log.warning("another controller may have this run", error=str(error or "lease lost"))
        elif error is not None:
            log.error("run failed", exc_info=error)
            await self._end(run, runs_pb2.RUN_STATUS_FAILED, str(error) or type(error).__name__)
        else:
            await self._end(run, runs_pb2.RUN_STATUS_COMPLETED, "")

    async def _renew(self, run: str, epoch: int, task: asyncio.Task[None]) -> None:
        held = time.monotonic()
        while not task.done():
            await asyncio.sleep(LEASE_MS / 4000)
            try:
                if await self.store.acquire(run, self._holder) == epoch:
                    held = time.monotonic()
                    continue
            except (HeadraceError, redis_py.RedisError) as exc:
                log.warning("lease not renewed", error=str(exc))
                if time.monotonic() - held < LEASE_MS / 1000:
                    continue
            log.error("lease lost", run=run)
            task.cancel()
            return

    async def _give_back(self, run: str) -> None:
        try:
            await self.store.release(run, self._holder)
        except (HeadraceError, redis_py.RedisError) as exc:
            log.warning("lease not released", error=str(exc))

    async def _run(self, run: str, epoch: int) -> None:
        """Everything from the record to the end of the step loop."""
        assert self._peers is not None
        fields = await self.store.fields(run)
        paths = Home(self._settings.home).run(run).create()
        recipe = Recipe.model_validate_json(fields["recipe"])
        folder = recipe.checkpointing.checkpoint_dir or str(paths.checkpoints)
        ctx = RunContext(run, recipe, fields["recipe"], epoch, folder)
        await self.store.update(run, started_ns=fields.get("started_ns") or time.time_ns())
        if not self._switch.paused:
            await self.store.update(run, status=runs_pb2.RUN_STATUS_RUNNING)
            await self.store.emit(run, "status", "running")
        loop, max_steps = await self._prepare(ctx, self._peers)
        await self.store.update(run, max_steps=max_steps)
        engine = asyncio.create_task(self._remember_engine(run, self._peers))
        try:
            await loop.run()
            if recipe.checkpointing.export_dir:
                await loop.export(recipe.checkpointing.export_dir)
            await self._peers.release(run)
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    async def _prepare(self, ctx: RunContext, peers: Peers) -> tuple[StepLoop, int]:
        recipe = ctx.recipe
        rows = RowFile(Path(recipe.data.train.data_path))
        await self._check_fingerprint(ctx.run, rows)
        source = recipe.data.validation
        held_out = RowFile(Path(source.data_path), limit=recipe.grpo.max_val_samples) if source else None
        max_steps = recipe.max_steps
        if recipe.max_epochs is not None:
            max_steps = min(max_steps, recipe.max_epochs * len(rows) // recipe.prompts_per_step)
        if max_steps < 1:
            raise InvalidInput(
                f"{len(rows)} rows make no step of {recipe.prompts_per_step} prompts",
                where=str(rows.path), do="Add rows, or lower num_prompts_per_step.",
            )  # fmt: skip
        progress = Progress.from_journal(await self.store.journal(ctx.run))
        draws = Draws(rows, seed=ctx.seed, shuffle=recipe.data.shuffle)
        dispatcher = Dispatcher(ctx, peers, self.store, draws)
        validator = Validator(ctx, peers, self.store, dispatcher, held_out)
        loop = StepLoop(ctx, peers, self.store, progress, dispatcher, validator, max_steps, self._switch)
        return loop, max_steps

    async def _check_fingerprint(self, run: str, rows: RowFile) -> None:
        known = (await self.store.journal(run)).get("data")
        if known is None:
            await self.store.write_journal(run, data=rows.fingerprint)
        elif known != rows.fingerprint:
            raise InvalidInput(
                f"The training data changed: it was {known[:12]}, the file is {rows.fingerprint[:12]}",
                where=str(rows.path), do="Resume with the original file, or start a new run.",
            )  # fmt: skip

    async def _remember_engine(self, run: str, peers: Peers) -> None:
        """Keep the first ready engine's name and version in the record."""
        async for roster in peers.refit.WatchRoster(refit_pb2.WatchRosterRequest()):
            for entry in roster.engines:
                if entry.info.ready and entry.info.name:
                    info = entry.info
                    record = {
                        "name": info.name, "version": info.engine_version, "device": info.device,
                        "dtype": info.dtype, "max_model_len": info.max_model_len,
                    }  # fmt: skip
                    await self.store.update(run, engine=json.dumps(record))
                    return

    async def _end(self, run: str, status: runs_pb2.RunStatus.ValueType, error: str) -> None:
        """Close the books of ``run`` and write what stays of it."""
        if status != runs_pb2.RUN_STATUS_COMPLETED:
            await self._close_open(run, "cancelled" if status == runs_pb2.RUN_STATUS_CANCELLED else "failed")
        name, ended_ns = status_name(status), time.time_ns()
        paths = Home(self._settings.home).run(run).create()
        try:
            await summary.seal_run(
                self.store, self._client, paths, status=name, error=error, ended_ns=ended_ns
            )
        except (HeadraceError, redis_py.RedisError, OSError):
            log.exception("the run's record could not be sealed")
        await self.store.emit(run, "status", f"{name}: {error}" if error else name)
        # Last: whoever sees the end may stop this process.
        await self.store.update(run, status=int(status), error=error, ended_ns=ended_ns, phase="")
        if status == runs_pb2.RUN_STATUS_COMPLETED and paths.ledger.is_file():
            await expire_books(self._client, run)

    async def _close_open(self, run: str, reason: str) -> None:
        assert self._peers is not None
        if not (await self.store.get(run)).started_ns:
            return  # it has no books yet: the buffer would be asked in vain until the call's deadline
        try:
            request = buffer_pb2.DropOpenRequest(run=run, book=TRAIN_BOOK, reason=reason)
            await self._peers.buffer.DropOpen(request, timeout=15)
            await self._peers.release(run)
        except HeadraceError as exc:
            log.warning("open groups stay open", error=str(exc))
