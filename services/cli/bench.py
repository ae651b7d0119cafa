"""``headrace bench``: list the benchmarks, or run one.

A benchmark is a module ``benchmarks.NAME`` with ``SUMMARY`` (one line) and ``run(args)``, which measures and
returns claims (:mod:`benchmarks.report`). Modules are found in the package and loaded by name when they run:
listing them imports none, because they import engines and trainers.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.failures import FAILED
from services.cli.output import console, print_json
from services.runtime.errors import InvalidInput

# `async` is a word of the language, so its module has another name.
_ALIASES = {"asynchronous": "async"}
_HELPERS = ("report",)


def bench_command(name: str | None, args: Sequence[str], *, as_json: bool) -> int:
    """Run benchmark ``name``, or list all; 1 when a bar is missed."""
    found = benchmarks()
    if name is None:
        _list(found, as_json=as_json)
        return 0
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(found)}."
        raise InvalidInput(f"There is no benchmark {name!r}", do=hint)
    claims = importlib.import_module(found[name][0]).run(list(args))
    if as_json:
        told = [claim.to_dict() for claim in claims]
        print_json(told[0] if len(told) == 1 else told)
    else:
        _print(claims)
    return 0 if all(claim.met for claim in claims) else FAILED


def benchmarks() -> dict[str, tuple[str, str]]:
    """Name -> module and summary, of the installed package."""
    package = importlib.util.find_spec("benchmarks")
    if package is None or not package.submodule_search_locations:
        return {}
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.py"))
    found = {}
    for file in files:
        summary = _summary(file)
        if summary and file.stem not in _HELPERS:
            found[_ALIASES.get(file.stem, file.stem)] = (f"benchmarks.{file.stem}", summary)
    return found


def _summary(file: Path) -> str:
    """The string that ``SUMMARY`` is set to; empty for a module without one."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["SUMMARY"]:
                return str(node.value.value)
    return ""


def _list(found: dict[str, tuple[str, str]], *, as_json: bool) -> None:
    if as_json:
        print_json([{"name": name, "summary": summary} for name, (_, summary) in found.items()])
        return
    table = Table("benchmark", "what it measures", box=None, padding=(0, 2, 0, 0))
    for name, (_, summary) in found.items():
        table.add_row(name, summary)
    console().print(table)


def _print(claims: Sequence[Any]) -> None:
    table = Table("claim", "value", "baseline", "unit", "ratio", "bar", "", box=None, padding=(0, 2, 0, 0))
    for claim in claims:
        bar = "" if claim.bar is None else f"{claim.bar:.2f}"
        verdict = "" if claim.bar is None else "met" if claim.met else "MISSED"
        baseline = f"{claim.baseline:,.4g} ({claim.baseline_name})"
        cells = (claim.name, f"{claim.value:,.4g}", baseline, claim.unit, f"{claim.ratio:.2f}", bar, verdict)
        table.add_row(*cells)
    console().print(table)
