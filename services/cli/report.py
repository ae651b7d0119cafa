"""A run's summary for people: what it learned, its metrics, its books, where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from services.cli.output import console, print_json

_METRICS = (
    "reward", "loss", "grad_norm", "approx_entropy", "token_mult_prob_error", "gen_kl_error",
    "truncation_rate", "mean_gen_tokens_per_sample",
)  # fmt: skip


def print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """The summary as JSON, or as a table."""
    if as_json:
        print_json(summary)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    console().print(table)


def summary_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    yield "run", f"{summary['run_id']} ({summary['kind']})"
    yield "status", str(summary["status"]) + (f": {summary['error']}" if summary.get("error") else "")
    yield "steps", f"{summary['steps']} of {summary['max_steps']}"
    yield from _validation(summary.get("validation") or {})
    metrics = summary.get("metrics") or {}
    for name in _METRICS:
        if name in metrics:
            yield name, f"{metrics[name]:.6g}"
    engine = summary.get("engine") or {}
    if engine:
        yield "engine", f"{engine.get('name')} {engine.get('version')}"
    yield from _books(summary.get("ledger") or {})
    yield from _time(summary.get("timing") or {}, summary.get("throughput") or {})
    yield from _overhead(summary.get("overhead") or {})


def _validation(validation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if validation:
        first, last = validation["initial"], validation["final"]
        yield "accuracy", f"{first['accuracy']:.3f} -> {last['accuracy']:.3f} (step {last.get('step', '?')})"


def _books(ledger: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if ledger:
        dropped = ", ".join(f"{n} {reason}" for reason, n in ledger["dropped"].items()) or "0"
        counts = f"{ledger['dispatched']} dispatched = {ledger['trained']} trained"
        yield "books (groups)", f"{counts} + {dropped} dropped + {ledger['open']} open"


def _overhead(overhead: dict[str, float]) -> Iterator[tuple[str, str]]:
    if overhead:
        spent = f"{overhead['seconds']:.1f} s ({overhead['share']:.1%})"
        yield "overhead", f"{spent}: neither generation, environment, training, refit nor validation"


def _time(timing: dict[str, float], throughput: dict[str, float]) -> Iterator[tuple[str, str]]:
    total = timing.get("total", 0.0)
    if total <= 0:
        return
    parts = [
        f"{name} {seconds:.1f} s ({seconds / total:.0%})"
        for name, seconds in timing.items()
        if name != "total"
    ]
    yield "time", f"{total:.1f} s: " + ", ".join(parts)
    if "tokens_per_s" in throughput:
        yield "tokens/s", f"{throughput['tokens_per_s']:.0f}"
