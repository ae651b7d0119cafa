"""Short paths for unix sockets (their limit is about 100 bytes, and a home may lie deep).

Invariant: the folder belongs to this user alone, and its name follows from the home; all users of a home
find the same socket, because the first one writes the path down in the home.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from services.runtime.errors import InvalidInput
from services.runtime.home import Home, write_atomic

LIMIT = 100


def socket_path(home: Path) -> Path:
    """Path of the embedded Redis's socket for ``home``; its folder exists afterwards."""
    note = Home(home).redis / "socket"
    if note.exists():
        noted = Path(note.read_text().strip())
        if noted.parent.name == _key(home) and _usable(noted.parent):
            return noted
    chosen = _folder(home) / "redis.sock"
    write_atomic(note, f"{chosen}\n")
    return chosen


def _key(home: Path) -> str:
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]


def _folder(home: Path) -> Path:
    bases = [Path("/tmp") / f"headrace-{os.getuid()}"]  # noqa: S108 (checked by _usable)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and len(runtime) < LIMIT - 40:
        bases.insert(0, Path(runtime) / "headrace")
    for base in bases:
        folder = base / _key(home)
        if _usable(base) and _usable(folder):
            return folder
    raise InvalidInput("No private folder for sockets", where=str(bases[-1]), do="Set XDG_RUNTIME_DIR.")


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    # Others may create names in /tmp: never trust a folder that is not ours alone.
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
