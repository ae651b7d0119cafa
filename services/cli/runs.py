"""``headrace runs``: list, show and audit, from disk or from the store, with or without a stack."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.table import Table

from protos.headrace.v1 import runs_pb2
from services.buffer.audit import audit_file, audit_store
from services.cli.failures import FAILED
from services.cli.output import console, print_json, say
from services.cli.report import print_summary
from services.cli.stacks import is_held
from services.controller import summary
from services.controller.store import RunStore
from services.recipe.load import load_resolved
from services.runtime import redis
from services.runtime.errors import NotFound
from services.runtime.home import Home, RunPaths, default_home, resolve_run
from services.runtime.redis_errors import translated


def list_command(limit: int, *, as_json: bool) -> None:
    """The newest runs of this home."""
    home = Home(default_home())
    found = [_listed(home, home.run(run)) for run in reversed(home.run_ids()[-limit:])]
    if open_runs := [run for run in found if run["status"] is None]:
        asyncio.run(_ask_store(home, open_runs))
    if as_json:
        print_json(found)
        return
    if not found:
        say(f"no runs yet in {home.runs}")
        return
    table = Table("run", "kind", "status", "steps", "accuracy", box=None, padding=(0, 2, 0, 0))
    for run in found:
        accuracy = run["accuracy"]
        shown = "" if accuracy is None else f"{accuracy:.3f}"
        table.add_row(
            run["run_id"],
            run["kind"],
            run["status"],
            f"{'?' if run['steps'] is None else run['steps']}/{run['max_steps']}",
            shown,
        )
    console().print(table)


def show_command(name: str, *, as_json: bool) -> None:
    """One run's summary."""
    home = Home(default_home())
    print_summary(summary.load(home, resolve_run(home, name).run_id), as_json=as_json)


def audit_command(name: str, *, as_json: bool) -> int:
    """Recount a run's books; 1 when they do not balance."""
    home = Home(default_home())
    audit = run_audit(home, resolve_run(home, name))
    if as_json:
        print_json(audit_dict(audit))
    else:
        _print_audit(audit)
    return 0 if audit.balanced else FAILED


def run_audit(home: Home, paths: RunPaths) -> runs_pb2.AuditResponse:
    """From the sealed ledger when there is one, else from the store."""
    if paths.ledger.is_file():
        return audit_file(paths.ledger)
    return asyncio.run(_audit_store(home, paths))


def audit_dict(audit: runs_pb2.AuditResponse) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "run": audit.run,
        "balanced": audit.balanced,
        "source": audit.source,
        "events": audit.events,
        "books": {
            book.book: {"groups": counts_dict(book.groups), "samples": counts_dict(book.samples)}
            for book in audit.books
        },
        "imbalances": [{"book": item.book, "text": item.text} for item in audit.imbalances],
    }


def counts_dict(counts: Any) -> dict[str, Any]:
    """One side of a book."""
    return {
        "dispatched": counts.dispatched,
        "trained": counts.trained,
        "dropped": dict(counts.dropped),
        "open": counts.open,
    }


async def _audit_store(home: Home, paths: RunPaths) -> runs_pb2.AuditResponse:
    url = load_resolved(paths.recipe).recipe.stack.redis_url
    with redis.acquire(home.root, url) as handle:
        client = redis.connect(handle.url)
        try:
            with translated(handle.url):
                return await audit_store(client, paths.run_id)
        finally:
            await client.aclose()


def _print_audit(audit: runs_pb2.AuditResponse) -> None:
    table = Table("book", "of", "dispatched", "trained", "dropped", "open", box=None, padding=(0, 2, 0, 0))
    for book in audit.books:
        for what, counts in (("groups", book.groups), ("samples", book.samples)):
            dropped = ", ".join(f"{n} {reason}" for reason, n in counts.dropped.items()) or "0"
            row = (book.book, what, str(counts.dispatched), str(counts.trained), dropped, str(counts.open))
            table.add_row(*row)
    console().print(table)
    for item in audit.imbalances:
        say(f"{item.book}: {item.text}")
    verdict = "balanced" if audit.balanced else "NOT balanced"
    console().print(
        f"{audit.run}: {verdict}, recounted from {audit.events} events ({audit.source})", markup=False
    )


def _listed(home: Home, paths: RunPaths) -> dict[str, Any]:
    """A line of the list: from the summary on disk, else from the recipe; the status of one that has not
    ended is the store's to say."""
    found: dict[str, Any] = {"run_id": paths.run_id, "accuracy": None, "steps": None}
    if summary.summary_path(paths).is_file():
        full = summary.load(home, paths.run_id)
        final = (full.get("validation") or {}).get("final") or {}
        found["accuracy"] = final.get("accuracy")
        return {**found, **{key: full[key] for key in ("kind", "status", "steps", "max_steps")}}
    recipe = load_resolved(paths.recipe).recipe
    return {**found, "kind": recipe.kind, "status": None, "max_steps": recipe.max_steps}


async def _ask_store(home: Home, runs: list[dict[str, Any]]) -> None:
    """Fill in status and steps of ``runs``, which have not ended."""
    by_url: dict[str | None, list[dict[str, Any]]] = {}
    for run in runs:
        url = load_resolved(home.run(run["run_id"]).recipe).recipe.stack.redis_url
        by_url.setdefault(url, []).append(run)
    for url, asked in by_url.items():
        with redis.acquire(home.root, url) as handle:
            client = redis.connect(handle.url)
            try:
                with translated(handle.url):
                    for run in asked:
                        run.update(await _stored(RunStore(client), home, run["run_id"]))
            finally:
                await client.aclose()


async def _stored(store: RunStore, home: Home, run: str) -> dict[str, Any]:
    """Status and steps; a run that its controller never heard of is starting, or was interrupted."""
    try:
        message = await store.get(run)
    except NotFound:
        return {"status": "starting" if is_held(home.run(run).root / "run.lock") else "interrupted"}
    return {"status": await summary.status_view(store, message), "steps": message.completed_steps}
