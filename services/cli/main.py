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
runs_app = typer.Typer(
    help="Look at runs, finished ones and live ones; pause, resume and cancel them.", no_args_is_help=True
)
app.add_typer(runs_app, name="runs")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
Address = Annotated[
    str | None,
    typer.Option(help="Controller, HOST:PORT; default: that of the stack.", envvar="HEADRACE_ADDRESS"),
]
StackName = Annotated[
    str | None, typer.Option("--stack", metavar="NAME", help="A stack of `headrace up`; default: `default`.")
]
Name = Annotated[str, typer.Option("--name", help="Name of the stack.")]
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
    address: Address = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Submit RECIPE to a stack that already runs."""
    from services.cli.remote import submit_command
    from services.cli.stacks import controller_address

    submit_command(recipe, overrides or [], controller_address(address, stack), as_json=as_json)


@app.command()
def watch(run_id: RunName, address: Address = None, as_json: Json = False) -> None:
    """Follow a run until it ends."""
    from services.cli.remote import watch_command

    raise typer.Exit(watch_command(run_id, address, as_json=as_json))


@app.command()
def up(
    name: Name = "default",
    recipe: Annotated[Path | None, typer.Option(help="Take the section `stack` of this recipe.")] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="Engines.")] = None,
    gym: Annotated[int | None, typer.Option(min=1, help="Gym workers.")] = None,
    reward: Annotated[int | None, typer.Option(min=1, help="Reward replicas.")] = None,
    buffer: Annotated[int | None, typer.Option(min=1, help="Buffer replicas.")] = None,
    ports: Annotated[str, typer.Option(help="`default` ones, or `free` ones.")] = "default",
    as_json: Json = False,
) -> None:
    """Start a stack in the background and wait until it is ready; with --gym or --engines, scale one."""
    from services.cli.up import Wanted, up_command

    if ports not in ("default", "free"):
        raise typer.BadParameter("must be default or free", param_hint="--ports")
    counts = {"engine": engines, "gym": gym, "reward": reward, "buffer": buffer}
    given = {service: count for service, count in counts.items() if count is not None}
    raise typer.Exit(up_command(Wanted(name, recipe, ports, given), as_json=as_json))


@app.command()
def down(
    name: Name = "default",
    kill: Annotated[bool, typer.Option("--kill", help="At once, not in order.")] = False,
    as_json: Json = False,
) -> None:
    """Stop a stack of `headrace up`; its runs can be resumed."""
    from services.cli.up import down_command

    raise typer.Exit(down_command(name, kill=kill, as_json=as_json))


@app.command()
def ps(as_json: Json = False) -> None:
    """Show the processes of every stack and live run of this home."""
    from services.cli.ps import ps_command

    raise typer.Exit(ps_command(as_json=as_json))


@app.command()
def health(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, or http://HOST:PORT/PATH.")],
    service: Annotated[str, typer.Option(help="Full gRPC name; empty: is the process alive.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 5.0,
) -> None:
    """Ask one service for its health; status 1 unless it serves."""
    from services.cli.health import health_command

    raise typer.Exit(health_command(address, service, timeout))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Nothing: list them.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a claim against its baseline; status 1 when a promise is not kept. More options are NAME's."""
    from services.cli.bench import bench_command

    raise typer.Exit(bench_command(name, context.args, as_json=as_json))


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


@runs_app.command("pause")
def runs_pause(run_id: RunName = "last", address: Address = None, as_json: Json = False) -> None:
    """Stop dispatch now and the run before its next step; it keeps its place and its services."""
    from services.cli.remote import act_command

    act_command("pause", run_id, address, as_json=as_json)


@runs_app.command("resume")
def runs_resume(run_id: RunName = "last", address: Address = None, as_json: Json = False) -> None:
    """Go on with a paused run."""
    from services.cli.remote import act_command

    act_command("resume", run_id, address, as_json=as_json)


@runs_app.command("cancel")
def runs_cancel(run_id: RunName = "last", address: Address = None, as_json: Json = False) -> None:
    """End a run for good; its open groups are dropped and counted."""
    from services.cli.remote import act_command

    act_command("cancel", run_id, address, as_json=as_json)


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
