"""The layout of ``$HEADRACE_HOME``: where runs, the embedded Redis, traces and locks live.

Invariants
- A run id is one path component (``RUN_ID``), so no id can point outside the home.
- Files that another process reads are written whole: temporary file, fsync, rename, fsync of the directory.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from services.runtime.errors import InvalidInput, NotFound

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def default_home() -> Path:
    """``$HEADRACE_HOME``, else ``~/.local/state/headrace``."""
    named = os.environ.get("HEADRACE_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".local/state/headrace"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run."""

    root: Path

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.root.name

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def traces(self) -> Path:
        """Span files."""
        return self.root / "traces"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder each."""
        return self.root / "checkpoints"

    @property
    def ledger(self) -> Path:
        """The sealed ledger."""
        return self.root / "ledger.jsonl"

    def create(self) -> RunPaths:
        """Make the run's folders; idempotent."""
        for folder in (self.traces, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        return self


@dataclass(frozen=True, slots=True)
class StackPaths:
    """The files of one stack of ``headrace up``."""

    root: Path

    @property
    def name(self) -> str:
        """Name of the stack."""
        return self.root.name

    @property
    def logs(self) -> Path:
        """One log per process, and the supervisor's."""
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        """Held by the supervisor for as long as it lives."""
        return self.root / "stack.lock"

    @property
    def spec(self) -> Path:
        """What was asked for."""
        return self.root / "spec.json"

    @property
    def board(self) -> Path:
        """What there is, as the supervisor last wrote it."""
        return self.root / "board.json"


@dataclass(frozen=True, slots=True)
class Home:
    """The folders under one ``$HEADRACE_HOME``."""

    root: Path

    @property
    def runs(self) -> Path:
        """One folder per run."""
        return self.root / "runs"

    @property
    def stacks(self) -> Path:
        """One folder per stack of ``headrace up``."""
        return self.root / "stacks"

    @property
    def redis(self) -> Path:
        """The embedded Redis: data, locks, log."""
        return self.root / "redis"

    @property
    def locks(self) -> Path:
        """Locks between processes."""
        return self.root / "locks"

    @property
    def traces(self) -> Path:
        """Spans that belong to no run."""
        return self.root / "traces"

    def run(self, run_id: str) -> RunPaths:
        """Paths of ``run_id``; raises InvalidInput when it is no legal id. Creates nothing."""
        if not RUN_ID.fullmatch(run_id):
            raise InvalidInput(
                f"{run_id!r} is no run id", do="Use letters, digits, '.', '_' and '-', at most 128."
            )
        return RunPaths(self.runs / run_id)

    def stack(self, name: str) -> StackPaths:
        """Paths of stack ``name``; raises InvalidInput when it is no legal name. Creates nothing."""
        if not RUN_ID.fullmatch(name):
            raise InvalidInput(
                f"{name!r} is no stack name", do="Use letters, digits, '.', '_' and '-', at most 128."
            )
        return StackPaths(self.stacks / name)

    def stack_names(self) -> list[str]:
        """Stacks that were ever brought up in this home, by name."""
        return sorted(spec.parent.name for spec in self.stacks.glob("*/spec.json"))

    def run_ids(self) -> list[str]:
        """Ids of the runs in this home (those with a recipe), oldest first."""
        found = [
            (recipe.stat().st_mtime_ns, recipe.parent.name) for recipe in self.runs.glob("*/recipe.yaml")
        ]
        return [name for _, name in sorted(found)]


def resolve_run(home: Home | Path, name: str) -> RunPaths:
    """The run called ``name``; ``last`` is the one submitted last. Raises NotFound."""
    place = home if isinstance(home, Home) else Home(home)
    known = place.run_ids()
    if name == "last" and known:
        return place.run(known[-1])
    if name in known:
        return place.run(name)
    text = "There is no run yet" if name == "last" else f"There is no run {name!r}"
    raise NotFound(text, where=str(place.runs), do="List runs with `headrace runs list`.")


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` so that a reader sees the old or the new content, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
