"""Prints what the demo showed: what the model learned, whether the books balance, where the time went.

Exit status 1 when the books do not balance or the run did not complete; accuracy is shown, not judged here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HEADRACE = Path(sys.executable).with_name("headrace")
PHASES = ("starting", "generation", "environment", "training", "refit", "validation", "checkpoint", "idle")


def ask(*argv: str) -> dict[str, Any]:
    """The JSON object that a ``headrace`` command prints; its exit status may be 1 (not balanced)."""
    done = subprocess.run([HEADRACE, *argv, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """A small table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=64)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def learned(run: dict[str, Any]) -> Table:
    """Accuracy before and after, and the metrics that say whether trainer and engine agree."""
    initial, final = run["validation"]["initial"], run["validation"]["final"]
    metrics, engine = run["metrics"], run["engine"]
    return two_columns(
        f"What it learned in {run['steps']} steps ({engine.get('name')} {engine.get('version')})",
        [
            ("greedy accuracy after the warm start", f"{initial['accuracy']:.3f}"),
            ("greedy accuracy at the end", f"{final['accuracy']:.3f}"),
            ("held-out rows", f"{final['rows']}"),
            ("token_mult_prob_error (mean; 1 is perfect)", f"{metrics['token_mult_prob_error']:.6f}"),
            ("gen_kl_error (mean; 0 is perfect)", f"{metrics['gen_kl_error']:.2e}"),
            *ahead(metrics),
        ],
    )


def ahead(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """What only an asynchronous run has."""
    if "token_age_max" not in metrics:
        return []
    return [
        ("token_mult_prob_error_raw (with the policy's lag)", f"{metrics['token_mult_prob_error_raw']:.6f}"),
        ("oldest trained token, in versions", f"{metrics['token_age_max']:.0f}"),
    ]


def books(run: dict[str, Any], audit: dict[str, Any]) -> Table:
    """dispatched = trained + dropped + open."""
    ledger = run["ledger"]
    dropped = ", ".join(f"{reason} {n}" for reason, n in ledger["dropped"].items()) or "0"
    return two_columns(
        "The books, in groups",
        [
            ("dispatched", str(ledger["dispatched"])),
            ("trained", str(ledger["trained"])),
            ("dropped", dropped),
            ("open", str(ledger["open"])),
            (f"balanced, recounted from the {audit['source']}", "yes" if audit["balanced"] else "NO"),
        ],
    )


def time_spent(run: dict[str, Any]) -> Table:
    """Seconds and shares by phase."""
    timing = run["timing"]
    total = max(timing["total"], 1e-9)
    rows = [
        (name, f"{timing.get(name, 0):7.1f} s  {100 * timing.get(name, 0) / total:4.0f} %") for name in PHASES
    ]
    return two_columns("Where the time went", [*rows, ("total", f"{total:7.1f} s  100 %")])


def main() -> int:
    """Print the report of the last run."""
    run, audit = ask("runs", "show", "last"), ask("runs", "audit", "last")
    console = Console()
    for table in (learned(run), books(run, audit), time_spent(run)):
        console.print(table)
    console.print(
        "Look further:\n"
        "  .venv/bin/headrace runs show last --json     every metric\n"
        "  .venv/bin/headrace runs audit last           the books, recounted\n"
        "  .venv/bin/headrace plan recipes/tiny/arithmetic.yaml   each key and where it comes from\n"
        f"  traces and logs: $HEADRACE_HOME/runs/{run['run_id']}"
    )
    return 0 if audit["balanced"] and run["status"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
