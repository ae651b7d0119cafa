"""``headrace``: the commands, and how failures become an exit status.

Invariants: one clear line on stderr per failure; status 2 for bad input, 1 for anything else, 130 for an
interruption; with ``--json`` stdout carries one JSON value and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from services.cli.roster import SERVICES

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
runs_app = typer.Typer(help="Look at runs, finished ones and live ones.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
Address = Annotated[str, typer.Option(help="Controller, HOST:PORT.", envvar="HEADRACE_ADDRESS")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run id, or `last`.")]
_SERVICE_HELP = f"One of {', '.join(sorted(SERVICES))}."


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning, as a set of independent services."""


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run; `last` is allowed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start the embedded stack, run RECIPE in it, and stop the stack again."""
    from services.cli.run import run_command

    raise typer.Exit(run_command(recipe, overrides or [], resume=resume, as_json=as_json))


@app.command()
def submit(
    recipe: RecipePath,
    overrides: Overrides = None,
    address: Address = "127.0.0.1:7000",
    as_json: Json = False,
) -> None:
    """Submit RECIPE to a stack that already runs."""
    from services.cli.remote import submit_command

    submit_command(recipe, overrides or [], address, as_json=as_json)


@app.command()
def watch(
    run_id: RunName,
    address: Annotated[
        str | None, typer.Option(help="Controller; default: the run's own stack.", envvar="HEADRACE_ADDRESS")
    ] = None,
    as_json: Json = False,
) -> None:
    """Follow a run until it ends."""
    from services.cli.remote import watch_command

    raise typer.Exit(watch_command(run_id, address, as_json=as_json))


@app.command()
def serve(name: Annotated[str, typer.Argument(metavar="NAME", help=_SERVICE_HELP)]) -> None:
    """Serve one service in this process; settings come from HEADRACE_<NAME>_*."""
    from services.cli.serve import serve_command

    raise typer.Exit(serve_command(name))


@app.command()
def plan(recipe: RecipePath, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show what RECIPE means: every key with its origin, what is not built yet, the processes."""
    from services.cli.plan import plan_command

    plan_command(recipe, overrides or [], as_json=as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine; status 1 when something is missing."""
    from services.cli.doctor import doctor_command

    raise typer.Exit(doctor_command(as_json=as_json))


@runs_app.command("list")
def runs_list(
    limit: Annotated[int, typer.Option(min=1, help="Newest runs shown.")] = 50, as_json: Json = False
) -> None:
    """List the runs of this home, newest first."""
    from services.cli.runs import list_command

    list_command(limit, as_json=as_json)


@runs_app.command("show")
def runs_show(run_id: RunName = "last", as_json: Json = False) -> None:
    """Show a run: validation, metrics, books, and where the time went."""
    from services.cli.runs import show_command

    show_command(run_id, as_json=as_json)


@runs_app.command("audit")
def runs_audit(run_id: RunName = "last", as_json: Json = False) -> None:
    """Prove that the books of a run balance; status 1 when they do not."""
    from services.cli.runs import audit_command

    raise typer.Exit(audit_command(run_id, as_json=as_json))


def guarded(action: Callable[[], object]) -> int:
    """Run ``action``; the exit status of how it ended."""
    try:
        status = action()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `headrace runs list | head`: the reader has gone, which is no failure of ours.
        sys.stderr.close()
        return 0
    except Exception as exc:
        from services.cli.failures import explain

        explained = explain(exc)
        if explained is None:
            raise
        if explained.line:
            print(f"error: {explained.line}", file=sys.stderr)
        return explained.status
    return status if isinstance(status, int) else 0


def _app() -> object:
    # Not standalone: a wrong command line is told by us, in one line like everything else.
    return app(prog_name="headrace", standalone_mode=False)


def main() -> int:
    """Entry point of the ``headrace`` command."""
    return guarded(_app)


if __name__ == "__main__":
    raise SystemExit(main())
