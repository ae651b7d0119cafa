"""Locks on files, released by the kernel when their holder dies.

Invariant: every wait is bounded, and the descriptor is not inherited by programs that the holder starts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Self

from services.runtime.errors import TimedOut

POLL_SECONDS = 0.02


class FileLock:
    """One ``flock`` on one file; shared or exclusive, held until released."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take the lock if that is possible at once."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def lock(self, timeout: float, *, shared: bool = False) -> Self:
        """Take the lock within ``timeout`` seconds; raises TimedOut."""
        end = time.monotonic() + timeout
        while not self.try_lock(shared=shared):
            if time.monotonic() > end:
                raise TimedOut(f"The lock was not free within {timeout:g} s", where=str(self.path))
            time.sleep(POLL_SECONDS)
        return self

    def unlock(self) -> None:
        """Give the lock up and keep the file open."""
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the lock up for good; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
