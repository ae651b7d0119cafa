"""Finds and kills what a supervised process left behind; run by file, it watches over a whole stack.

Invariants
- A process belongs to a stack when its environment carries the stack's random token, or when it lives in a
  session that the supervisor started (a program that rewrites its title destroys its visible environment).
- A process is killed through a pidfd that was opened before it was looked at: a reused pid is never hit.
- As a program it reads ``+PID`` and ``-PID`` (sessions) from stdin and kills the stack when stdin ends,
  which the kernel guarantees when the supervisor dies. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

TOKEN_KEY = "HEADRACE_SUPERVISED"  # noqa: S105 (a name)
LAST_SWEEP_SECONDS = 5.0
PAUSE_SECONDS = 0.05


def sweep(token: str, sessions: Collection[int]) -> int:
    """One pass over all processes: SIGKILL those of ``token`` or ``sessions``; how many there were."""
    return sum(_kill_if_ours(pid, token, sessions) for pid in _pids())


def sweep_until_clean(token: str, sessions: Collection[int], timeout: float = LAST_SWEEP_SECONDS) -> bool:
    """Sweep until a pass finds nobody (a dying process may still have forked); False after ``timeout``."""
    end = time.monotonic() + timeout
    while sweep(token, sessions):
        if time.monotonic() > end:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _kill_if_ours(pid: int, token: str, sessions: Collection[int]) -> bool:
    if pid == os.getpid():
        return False
    with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
        handle = os.pidfd_open(pid)
        try:
            if _is_ours(pid, token, sessions):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def _is_ours(pid: int, token: str, sessions: Collection[int]) -> bool:
    # The name in parentheses may contain anything, so fields are counted from its end.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return False
    return int(fields[3]) in sessions or _carries(pid, token)


def _carries(pid: int, token: str) -> bool:
    marked = f"{TOKEN_KEY}={token}".encode()
    return any(entry.startswith(marked) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def main(token: str) -> int:
    """Follow the supervisor's sessions until it closes the pipe or dies, then leave nothing of the stack."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the terminal's signals to the group
    sessions: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            sessions.add(int(line[1:]))
        else:
            sessions.discard(int(line[1:]))
    return 0 if sweep_until_clean(token, sessions) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
