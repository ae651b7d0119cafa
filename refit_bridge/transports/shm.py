"""The ``shm`` transport: one file below /dev/shm for each weight version, read by every engine of the host.

Invariants
- Names are ``headrace-<run>-<incarnation>-<number>-<random>``; nothing else is ever opened or deleted.
- A file is written by its owner alone (mode 0600) and never changes once it has been described.
- The owner holds a lock on the open file; one that nobody holds is left over from a process that was killed,
  and is deleted by whoever comes next.
- Tensors start at multiples of ``ALIGN`` bytes, so that any dtype can be viewed in place.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refit_bridge.plan import TensorSpec
from services.runtime.errors import Exhausted, InvalidInput, NotFound

ROOT = Path("/dev/shm")  # noqa: S108 (names are random, files are created exclusively)
ALIGN = 64
ORPHAN_SECONDS = 60.0
_RUN = re.compile(r"[^A-Za-z0-9_.]+")
_NAME = re.compile(r"headrace-([A-Za-z0-9_.-]+)-(\d+)-(\d+)-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor's bytes lie in the file."""

    name: str
    offset: int
    nbytes: int


def layout(plan: Sequence[TensorSpec]) -> tuple[list[Slice], int]:
    """Place the tensors one after the other, aligned; returns the slices and the file's size in bytes."""
    slices: list[Slice] = []
    end = 0
    for spec in plan:
        slices.append(Slice(spec.name, end, spec.nbytes))
        end += -(-spec.nbytes // ALIGN) * ALIGN
    return slices, max(end, ALIGN)


def run_token(run: str) -> str:
    """The run's name as it appears in file names."""
    return _RUN.sub("_", run)[:80] or "run"


def new_name(run: str, incarnation: int, number: int) -> str:
    """A fresh file name for one version."""
    return f"headrace-{run_token(run)}-{incarnation}-{number}-{secrets.token_hex(8)}"


def safe_path(name: str, *, root: Path = ROOT) -> Path:
    """The path of a file name that came over the wire; raises InvalidInput unless it is one of ours."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidInput(f"{name!r} is not the name of a weight file", where=str(root))
    return root / name


def create(name: str, nbytes: int, *, root: Path = ROOT) -> int:
    """Create the file with ``nbytes`` of memory behind it and return its descriptor, which holds the lock.

    Raises Exhausted when there is not enough room (a write to a full tmpfs would kill the process by SIGBUS).
    """
    check_room(nbytes, root=root)
    path = safe_path(name, root=root)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as exc:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise _no_room(nbytes, _free(root), root) from exc
    return descriptor


def open_existing(name: str, *, root: Path = ROOT) -> int:
    """Open a file of ours for reading (mapped privately by the caller); raises NotFound."""
    path = safe_path(name, root=root)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as exc:
        raise NotFound(
            f"Weight file {name} does not exist",
            where=str(root),
            do="Stage the version again.",
            reason="NO_WEIGHTS",
        ) from exc


def check_room(nbytes: int, *, root: Path = ROOT) -> None:
    """Raise Exhausted when the file system has not ``nbytes`` free."""
    free = _free(root)
    if free < nbytes:
        raise _no_room(nbytes, free, root)


def remove(name: str, *, root: Path = ROOT) -> bool:
    """Delete a file of ours; False when it was gone. Mappings of it live on until they are closed."""
    try:
        safe_path(name, root=root).unlink()
    except FileNotFoundError:
        return False
    return True


def sweep(run: str, *, keep: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Delete what earlier processes of this run left behind, and what nobody owns; returns the names."""
    token = run_token(run)
    found = {path.name: _NAME.fullmatch(path.name) for path in root.glob("headrace-*")}
    mine = {name for name, match in found.items() if match and match.group(1) == token}
    stale = [name for name, match in found.items() if match and (name in mine or _is_orphan(root / name))]
    return [name for name in stale if name not in keep and remove(name, root=root)]


def _is_orphan(path: Path) -> bool:
    """Whether no process holds the lock. Young files are left alone: theirs may be about to be taken."""
    try:
        if time.time() - path.stat().st_mtime < ORPHAN_SECONDS:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _free(root: Path) -> int:
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def _no_room(nbytes: int, free: int, root: Path) -> Exhausted:
    return Exhausted(
        f"Weights of {nbytes / 2**20:.0f} MiB do not fit: {free / 2**20:.0f} MiB are free",
        where=str(root),
        do="Enlarge /dev/shm (docker: --shm-size) or delete stale headrace-* files there.",
        reason="NO_SHARED_MEMORY",
    )
