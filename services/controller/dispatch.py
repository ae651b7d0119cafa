"""Opening groups: rows become work, each sample with the root of its trace.

Invariants: what a name was drawn for is decided once (the journal's draws), so opening again after a crash
opens the same groups; a dropped group is replaced by a new draw for the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context

from protos.headrace.v1 import buffer_pb2, types_pb2
from services.controller.data import Draws, Row, agent_of
from services.controller.peers import Peers, RunContext
from services.controller.store import RunStore
from services.runtime import tracing

GROUPS_PER_CALL = 256
TRAIN_BOOK = "train"


def training_sampling(ctx: RunContext) -> types_pb2.SamplingParams:
    """Explicit sampling parameters of training rollouts."""
    g = ctx.recipe.policy.generation
    return types_pb2.SamplingParams(
        temperature=g.temperature, top_p=g.top_p, top_k=g.top_k or -1, min_p=g.min_p,
        max_new_tokens=g.max_new_tokens, stop_token_ids=g.stop_token_ids or [], stop=g.stop_strings or [],
        bad_words=g.bad_words or [],
    )  # fmt: skip


def validation_sampling(ctx: RunContext) -> types_pb2.SamplingParams:
    """The same with the recipe's ``val_`` values where it has some."""
    g = ctx.recipe.policy.generation
    params = training_sampling(ctx)
    if g.val_temperature is not None:
        params.temperature = g.val_temperature
    if g.val_top_p is not None:
        params.top_p = g.val_top_p
    if g.val_top_k is not None:
        params.top_k = g.val_top_k or -1
    if g.val_max_new_tokens is not None:
        params.max_new_tokens = g.val_max_new_tokens
    return params


class Dispatcher:
    """Opens the groups of training steps and of validation books."""

    def __init__(self, ctx: RunContext, peers: Peers, store: RunStore, draws: Draws) -> None:
        self._ctx = ctx
        self._peers = peers
        self._store = store
        self._draws = draws
        self._sampling = training_sampling(ctx)
        self._opened: set[int] = set()

    def forget(self) -> None:
        """A restore may have taken groups back: open every step again when its turn comes."""
        self._opened.clear()

    async def open_step(self, step: int) -> None:
        """Open the groups of ``step``, replacements of an earlier life included; idempotent."""
        if step in self._opened:
            return
        count = self._ctx.recipe.prompts_per_step
        await self._open_round(step, 0, count)
        rounds = 1
        while await self._store.drawn(self._ctx.run, f"{step}:{rounds}"):
            await self._open_round(step, rounds, 0)
            rounds += 1
        self._opened.add(step)

    async def replace(self, step: int, missing: int) -> None:
        """Draw ``missing`` more groups for ``step``."""
        rounds = 1
        while await self._store.drawn(self._ctx.run, f"{step}:{rounds}"):
            rounds += 1
        await self._open_round(step, rounds, missing)

    async def _open_round(self, step: int, number: int, count: int) -> None:
        draw = await self._store.draw(self._ctx.run, f"{step}:{number}", count)
        rows = [(ordinal, self._draws.row(ordinal)) for ordinal in draw]
        samples = self._ctx.recipe.generations_per_prompt
        await self.open(TRAIN_BOOK, step, rows, samples, self._sampling, self._ctx.recipe.data.train.agent)

    async def open(
        self,
        book: str,
        step: int,
        rows: Iterable[tuple[int, Row]],
        samples: int,
        sampling: types_pb2.SamplingParams,
        default_agent: str | None,
    ) -> None:
        """Open one group of ``samples`` for each (ordinal, row)."""
        specs = []
        for ordinal, row in rows:
            spec = self._spec(book, step, ordinal, row, samples, sampling)
            spec.agent.CopyFrom(agent_of(row, default_agent, supervised=self._ctx.supervised))
            specs.append(spec)
        for start in range(0, len(specs), GROUPS_PER_CALL):
            await self._peers.buffer.OpenGroups(
                buffer_pb2.OpenGroupsRequest(
                    run=self._ctx.run, book=book, fence=self._ctx.fence(step),
                    groups=specs[start : start + GROUPS_PER_CALL],
                )
            )  # fmt: skip

    def _spec(
        self,
        book: str,
        step: int,
        ordinal: int,
        row: Row,
        samples: int,
        sampling: types_pb2.SamplingParams,
    ) -> buffer_pb2.GroupSpec:
        return buffer_pb2.GroupSpec(
            group=ordinal,
            samples=samples,
            target_step=step,
            row_json=row.json,
            row_source=row.source,
            sampling=sampling,
            run_seed=self._ctx.seed,
            traces=[self._root(book, step, ordinal, i) for i in range(samples)],
        )

    def _root(self, book: str, step: int, group: int, sample: int) -> types_pb2.TraceContext:
        attributes = {
            "headrace.run": self._ctx.run,
            "headrace.group": str(group),
            "headrace.sample": str(sample),
        }
        with tracing.span(
            "dispatch",
            parent=Context(),
            attributes={**attributes, "headrace.book": book, "headrace.step": step},
        ):
            return types_pb2.TraceContext(traceparent=tracing.current_traceparent() or "")
