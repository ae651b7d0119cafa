"""The object that ``headrace runs show --json`` prints.

Invariants: built from the store alone, hence the same for a live run, after a crash and after the end;
``timing`` phases and ``idle`` add up to ``total``, of which ``overhead`` is the part that does no work; a
value that nobody measured is absent, never zero.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from protos.headrace.v1 import runs_pb2
from services.buffer.audit import audit as prove
from services.buffer.audit import audit_store
from services.buffer.ledger import read_store, write_evidence
from services.buffer.steps import Steps
from services.buffer.transitions import Transitions
from services.controller.store import RunStore, status_name
from services.controller.timing import overhead, total
from services.recipe.load import load_resolved
from services.runtime import redis
from services.runtime.errors import HeadraceError, NotFound
from services.runtime.home import Home, RunPaths, write_atomic
from services.runtime.logs import get_logger

log = get_logger("controller")

TRAIN_BOOK = "train"
_EMPTY = {"dispatched": 0, "trained": 0, "dropped": {}, "open": 0}


def summary_path(paths: RunPaths) -> Any:
    """Where the summary of an ended run lies."""
    return paths.root / "summary.json"


async def build(
    store: RunStore, client: Any, run: str, audit: runs_pb2.AuditResponse | None = None
) -> dict[str, Any]:
    """The summary as the store has it now; the books as ``audit`` proved them, else as they are counted."""
    fields = await store.fields(run)
    steps = await store.steps(run)
    validations = list((await store.validations(run)).values())
    journal = await store.journal(run)
    extra = await store.extra_seconds(run)
    message = await store.get(run)
    timing = total([record["seconds"] for record in steps.values()] + [extra])
    return {
        "run_id": run,
        "name": message.name,
        "kind": message.kind,
        "status": await status_view(store, message),
        "error": message.error,
        "steps": message.completed_steps,
        "max_steps": message.max_steps,
        "validation": validation_view(validations),
        "metrics": metric_means(list(steps.values())),
        "metrics_last": steps[max(steps)]["metrics"] if steps else {},
        "engine": json.loads(fields.get("engine", "{}")),
        "ledger": proved(audit) if audit is not None else await counted(client, run),
        "timing": {k: round(v, 3) for k, v in timing.items()},
        "overhead": overhead(timing),
        "throughput": throughput(list(steps.values()), timing),
        "incarnation": int(journal.get("incarnation", "0")),
        "created_ns": message.created_ns,
        "ended_ns": message.ended_ns,
    }


async def status_view(store: RunStore, message: runs_pb2.Run) -> str:
    """The run's status; "interrupted" when it should run and no controller has it."""
    active = message.status in (runs_pb2.RUN_STATUS_RUNNING, runs_pb2.RUN_STATUS_STARTING)
    if active and not await store.leased(message.run):
        return "interrupted"
    return status_name(message.status)


def validation_view(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Initial, final and best pass, and all of them."""
    if not records:
        return {}
    return {
        "initial": records[0],
        "final": records[-1],
        "best": max(records, key=lambda r: float(r["accuracy"])),
        "history": [{"step": r["step"], "accuracy": r["accuracy"]} for r in records],
    }


def metric_means(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each metric over the steps that have it; extrema over their own kind."""
    values: dict[str, list[float]] = {}
    for record in steps:
        for name, value in record["metrics"].items():
            values.setdefault(name, []).append(float(value))
    return {name: _fold(name, found) for name, found in sorted(values.items())}


def _fold(name: str, values: list[float]) -> float:
    if name.endswith(("_max", "/max")):
        return max(values)
    if name.endswith(("_min", "/min")):
        return min(values)
    return sum(values) / len(values)


def proved(audit: runs_pb2.AuditResponse) -> dict[str, Any]:
    """The training book in groups, and the same in samples, as the audit recounted them."""
    for book in audit.books:
        if book.book == TRAIN_BOOK:
            return {**_counts(book.groups), "samples": _counts(book.samples), "balanced": audit.balanced}
    return {**_EMPTY, "balanced": audit.balanced}


async def counted(client: Any, run: str) -> dict[str, Any]:
    """The same from the buffer's cached counts: cheap, for a run in progress; says nothing of balance."""
    try:
        progress = await Steps(Transitions(client)).progress(run, TRAIN_BOOK)
    except HeadraceError:
        return dict(_EMPTY)
    return {**_counts(progress.groups), "samples": _counts(progress.samples)}


def _counts(counts: Any) -> dict[str, Any]:
    return {
        "dispatched": int(counts.dispatched),
        "trained": int(counts.trained),
        "dropped": {k: int(v) for k, v in counts.dropped.items()},
        "open": int(counts.open),
    }


def throughput(steps: list[dict[str, Any]], timing: dict[str, float]) -> dict[str, float]:
    """Tokens and steps per second."""
    if not steps or timing["total"] <= 0:
        return {}
    tokens = sum(float(r["metrics"].get("total_num_tokens", 0)) for r in steps)
    out = {
        "steps_per_hour": 3600 * len(steps) / timing["total"],
        "tokens_per_s": tokens / timing["total"],
    }
    if timing["generation"] > 0:
        out["generation_tokens_per_s"] = tokens / timing["generation"]
    return out


async def seal_run(
    store: RunStore, client: Any, paths: RunPaths, *, status: str, error: str, ended_ns: int
) -> dict[str, Any]:
    """Seal the ledger, audit it, and write the summary; a run that never reached the buffer has no ledger.

    How the run ended is given, not read: the store says it only once this is on disk.
    """
    audit = None
    try:
        evidence = await read_store(client, paths.run_id)
    except NotFound:
        log.info("the run never reached the buffer: there is no ledger to seal")
    else:
        # A long run's evidence takes seconds: the loop must go on renewing the lease meanwhile.
        await asyncio.to_thread(write_evidence, evidence, paths.ledger)
        audit = await asyncio.to_thread(prove, evidence)
    summary = await build(store, client, paths.run_id, audit)
    summary.update(status=status, error=error, ended_ns=ended_ns)
    write_atomic(summary_path(paths), json.dumps(summary, indent=1))
    return summary


def sealed(paths: RunPaths) -> dict[str, Any] | None:
    """The summary of an ended run, as it was written at its end."""
    path = summary_path(paths)
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["status"] in ("completed", "cancelled", "failed") else None


def load(home: Home, run: str) -> dict[str, Any]:
    """The summary of ``run`` without a controller: from the store, else as it was sealed.

    The store comes second for a run that has ended: then the file is whole and needs no Redis.
    """
    found = sealed(home.run(run))
    if found is not None:
        return found
    return asyncio.run(_load_from_store(home, run))


async def _load_from_store(home: Home, run: str) -> dict[str, Any]:
    url = load_resolved(home.run(run).recipe).recipe.stack.redis_url
    with redis.acquire(home.root, url) as handle:
        client = redis.connect(handle.url)
        try:
            return await build(RunStore(client), client, run, await _audit_or_none(client, run))
        except NotFound as exc:
            raise NotFound(
                f"{run} was stopped before its controller knew of it",
                where=str(home.run(run).root),
                do=f"Start it with `headrace run --resume {run}`.",
            ) from exc
        finally:
            await client.aclose()


async def _audit_or_none(client: Any, run: str) -> runs_pb2.AuditResponse | None:
    try:
        return await audit_store(client, run)
    except NotFound:
        return None
