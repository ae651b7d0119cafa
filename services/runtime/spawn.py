"""Exec wrapper that ties a child's life to its parent's: ``spawn.py --parent PID -- CMD...``.

Invariants
- The child dies by SIGKILL as soon as the *thread* that spawned it ends, so spawn from the main thread.
- The wrapper sets the signal, then checks that the parent is still PID: a parent that died in between would
  otherwise never be noticed.
- Death signals survive exec and are not inherited by the command's own children.
- Only the standard library is imported, so that the wrapper starts in about 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def wrap(argv: Sequence[str], *, parent: int | None = None) -> list[str]:
    """``argv`` behind the wrapper, for ``subprocess.Popen`` in process ``parent`` (default: this one)."""
    pid = os.getpid() if parent is None else parent
    # By file, isolated and without site: nothing of the environment can slow or change the wrapper.
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--parent", str(pid), "--", *argv]


def set_death_signal(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signum`` to this process when the thread that spawned it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main(argv: Sequence[str]) -> int:
    """Set the death signal and become the command; returns only when that is impossible."""
    if len(argv) < 4 or argv[0] != "--parent" or argv[2] != "--":
        print("usage: spawn --parent PID -- CMD...", file=sys.stderr)
        return 2
    set_death_signal()
    if os.getppid() != int(argv[1]):
        return 1
    command = list(argv[3:])
    try:
        os.execvp(command[0], command)  # noqa: S606 (no shell is the point)
    except OSError as exc:
        print(f"Cannot start {command[0]}: {exc.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
