"""Bringing the services to one common place before the step loop goes on.

Invariants: every life of the loop begins here, the first one too; a trainer life that the journal does not
know has lost the weights since the last checkpoint, so the incarnation rises and the buffer gives back the
groups of later steps before anything is published.
"""

from __future__ import annotations

import asyncio
import time

from protos.headrace.v1 import buffer_pb2, refit_pb2, trainer_pb2
from services.controller.peers import REFUSALS, Peers, RunContext, Setup
from services.controller.progress import Progress
from services.controller.store import RunStore
from services.controller.validation import Validator
from services.runtime.errors import HeadraceError, NotReady
from services.runtime.logs import get_logger

log = get_logger("controller")

RETRY_S = 0.5
SETUP_S = 10.0
WATCH_S = 1.0


class TrainerLost(NotReady):
    """The trainer process that held the weights is gone; the loop must start from its checkpoint."""


class Recovery:
    """Sets the services up, and keeps them so while the loop runs."""

    def __init__(
        self, ctx: RunContext, peers: Peers, store: RunStore, progress: Progress, validator: Validator
    ) -> None:
        self._ctx = ctx
        self._peers = peers
        self._store = store
        self._progress = progress
        self._validator = validator
        self._vocab = 0

    async def begin(self) -> None:
        """Set everything up and settle where the run is; publishes the version that the trainer holds."""
        await self._store.emit(self._ctx.run, "phase", "starting services")
        stack = self._ctx.recipe.stack
        state, _ = await asyncio.gather(
            self._peers.setup_trainer(self._ctx, stack.trainer_start_timeout_s), self._setup_light()
        )
        self._vocab = state.vocab_size
        await self._peers.setup_refit(self._ctx, self._vocab, SETUP_S)
        ahead = await self._settle(state)
        if not ahead and not self._ctx.supervised:
            await self.publish(wait_s=stack.engine_start_timeout_s)

    async def _setup_light(self) -> None:
        end = time.monotonic() + self._ctx.recipe.stack.service_start_timeout_s
        while failed := await self._peers.setup_light(self._ctx, SETUP_S):
            if time.monotonic() > end:
                raise NotReady("Services could not be set up: " + "; ".join(failed))
            await asyncio.sleep(RETRY_S)

    async def _settle(self, state: trainer_pb2.TrainerState) -> bool:
        """Reconcile journal and trainer; True when the trainer is one step ahead of the journal."""
        progress = self._progress
        same = progress.started and state.process == progress.trainer
        if same and state.completed_steps in (progress.completed, progress.completed + 1):
            await self._validator.settle(progress.completed, restored=False)
            return state.completed_steps > progress.completed
        if progress.started:
            await self._restore(state)
            await self._validator.settle(state.completed_steps, restored=True)
        progress.completed, progress.trainer, progress.started = state.completed_steps, state.process, True
        await self._store.write_journal(self._ctx.run, **progress.fields())
        return False

    async def _restore(self, state: trainer_pb2.TrainerState) -> None:
        steps = state.completed_steps
        self._progress.incarnation += 1
        answer = await self._peers.buffer.Restore(
            buffer_pb2.RestoreRequest(run=self._ctx.run, fence=self._ctx.fence(steps), completed_steps=steps)
        )
        text = f"trainer restored to step {steps}; {answer.groups} groups go back for their steps"
        log.warning("restored", steps=steps, groups=answer.groups, incarnation=self._progress.incarnation)
        await self._store.emit(self._ctx.run, "restore", text, step=steps, values={"groups": answer.groups})

    async def publish(self, *, wait_s: float) -> refit_pb2.PublishResponse:
        """Publish the version of ``completed``; waits up to ``wait_s`` seconds for engines to start."""
        request = refit_pb2.PublishRequest(
            run=self._ctx.run,
            fence=self._ctx.fence(self._progress.completed),
            version=self._progress.version(),
        )
        end = time.monotonic() + wait_s
        while True:
            try:
                answer: refit_pb2.PublishResponse = await self._peers.refit.Publish(request, timeout=wait_s)
                return answer
            except NotReady as exc:
                if time.monotonic() > end:
                    raise
                log.info("publish waits", reason=str(exc))
                await asyncio.sleep(RETRY_S)

    async def watch(self) -> None:
        """Keep the services set up; raises TrainerLost when the trainer's memory is gone.

        Each service is looked after by itself: one that does not answer holds up nobody else.
        """
        setups = self._peers.light_setups(self._ctx)
        tasks = [asyncio.create_task(self._keep(name, setup)) for name, setup in setups.items()]
        tasks.append(asyncio.create_task(self._watch_trainer()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, setup: Setup) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await setup(SETUP_S)
            except REFUSALS:
                raise
            except HeadraceError as exc:
                log.debug("service is away", service=name, error=str(exc))

    async def _watch_trainer(self) -> None:
        seen = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                state = await self._peers.trainer.Status(trainer_pb2.TrainerStatusRequest(), timeout=3)
                if state.process != self._progress.trainer:
                    raise TrainerLost("The trainer process was replaced", where=state.process)
                await self._peers.setup_refit(self._ctx, self._vocab, SETUP_S)
            except TrainerLost:
                raise
            except HeadraceError as exc:
                if time.monotonic() - seen > self._ctx.recipe.stack.trainer_start_timeout_s:
                    raise NotReady(f"A service has been away for too long: {exc}") from exc
                continue
            seen = time.monotonic()
