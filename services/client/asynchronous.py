"""The asyncio client.

Invariants: submitting is idempotent by run id; :meth:`AsyncClient.watch` gives every event once and in
order, also across restarts of the controller, and ends when the run has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from services.recipe.files import anchored
from services.recipe.load import LoadedRecipe, from_dict, load, to_json
from services.runtime import rpc
from services.runtime.errors import NotFound, NotReady, TimedOut

RecipeLike = LoadedRecipe | Mapping[str, Any] | str | Path
ENDED = frozenset((runs_pb2.RUN_STATUS_COMPLETED, runs_pb2.RUN_STATUS_FAILED, runs_pb2.RUN_STATUS_CANCELLED))
PATIENCE_S = 60.0
RETRY_S = 0.3
STEPS_PAGE = 500


class AsyncClient:
    """Runs of the controller at ``address`` (HOST:PORT). Use it on one event loop, and close it."""

    def __init__(self, address: str, *, patience_s: float = PATIENCE_S) -> None:
        self.address = address
        self._patience = patience_s
        self._channel: rpc.HeadraceChannel | None = None

    async def submit(
        self, recipe: RecipeLike, overrides: Sequence[str] = (), *, run: str = ""
    ) -> runs_pb2.Run:
        """Queue a run; an existing ``run`` goes on with the recipe that it has.

        Raises RecipeError or InvalidInput on a bad recipe.
        """
        loaded = as_loaded(recipe, overrides)
        request = runs_pb2.SubmitRequest(
            run=run, recipe_json=to_json(anchored(loaded.recipe)), origins_json=json.dumps(loaded.origins)
        )
        answer: runs_pb2.Run = await self._stub().Submit(request)
        return answer

    async def resume(self, run: str, recipe: RecipeLike) -> runs_pb2.Run:
        """Go on with an interrupted ``run`` if the controller knows it, else submit it under that id."""
        try:
            await self.get(run)
        except NotFound:
            return await self.submit(recipe, run=run)
        answer: runs_pb2.Run = await self._stub().Submit(runs_pb2.SubmitRequest(run=run))
        return answer

    async def get(self, run: str) -> runs_pb2.Run:
        """One run; raises NotFound."""
        return await self._get(run, None)

    async def list(self, limit: int = 50) -> list[runs_pb2.Run]:
        """The newest runs, newest first."""
        answer: runs_pb2.ListRunsResponse = await self._stub().List(runs_pb2.ListRunsRequest(limit=limit))
        return list(answer.runs)

    async def cancel(self, run: str, reason: str = "") -> runs_pb2.Run:
        """Ask a run to end; idempotent."""
        answer: runs_pb2.Run = await self._stub().Cancel(runs_pb2.CancelRunRequest(run=run, reason=reason))
        return answer

    async def pause(self, run: str) -> runs_pb2.Run:
        """Stop dispatch at once and the loop before its next step; idempotent."""
        answer: runs_pb2.Run = await self._stub().Pause(runs_pb2.PauseRunRequest(run=run))
        return answer

    async def unpause(self, run: str) -> runs_pb2.Run:
        """Let a paused run go on; idempotent."""
        answer: runs_pb2.Run = await self._stub().Resume(runs_pb2.ResumeRunRequest(run=run))
        return answer

    async def steps(self, run: str, from_step: int = 0) -> AsyncIterator[runs_pb2.StepRecord]:
        """Records of the finished steps from ``from_step`` on, oldest first, fetched in pages."""
        while True:
            request = runs_pb2.ListStepsRequest(run=run, from_step=from_step, limit=STEPS_PAGE)
            answer: runs_pb2.ListStepsResponse = await self._stub().ListSteps(request)
            for record in answer.steps:
                yield record
            if len(answer.steps) < STEPS_PAGE:
                return
            from_step = answer.steps[-1].step + 1

    async def audit(self, run: str) -> runs_pb2.AuditResponse:
        """Recount a run's books from the store."""
        answer: runs_pb2.AuditResponse = await self._stub().Audit(runs_pb2.AuditRequest(run=run))
        return answer

    async def watch(self, run: str, from_sequence: int = 0) -> AsyncIterator[runs_pb2.RunEvent]:
        """Events of ``run`` from a sequence number on, until it ends; raises NotReady when its controller
        stays away for longer than the client's patience."""
        following, ended = from_sequence, False
        while True:
            # Also proves that the controller is there: a stream's own deadline is a day.
            ended = (await self._get(run, self._patience)).status in ENDED
            request = runs_pb2.WatchRunRequest(run=run, from_sequence=following)
            try:
                async with self._stub().Watch(request, timeout=self._patience) as events:
                    async for event in events:
                        following = event.sequence + 1
                        yield event
                if ended:
                    return
            except (NotReady, TimedOut):
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connection; idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _get(self, run: str, timeout: float | None) -> runs_pb2.Run:
        answer: runs_pb2.Run = await self._stub().Get(runs_pb2.GetRunRequest(run=run), timeout=timeout)
        return answer

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = rpc.connect(self.address, name="controller")
        return runs_pb2_grpc.RunsStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def as_loaded(recipe: RecipeLike, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """A path, nested dictionaries or a loaded recipe as a loaded one; raises RecipeError."""
    if isinstance(recipe, LoadedRecipe):
        return recipe
    if isinstance(recipe, Mapping):
        return from_dict(dict(recipe), overrides=overrides)
    return load(recipe, overrides)
