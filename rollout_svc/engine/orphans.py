"""Forked children of a worker die with it.

Invariants: call :func:`bind_forks` on the main thread before vLLM forks its EngineCore, and fork from the
main thread only: the kernel's death signal follows the forking thread. Children that are spawned rather than
forked get theirs from the plugin that vLLM loads in each of its processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from services.runtime.errors import Internal
from services.runtime.spawn import set_death_signal


def bind_forks(*, close_fds: Sequence[int] = ()) -> None:
    """Make every later ``os.fork`` child die with this process; ``close_fds`` are closed in the child."""
    if threading.current_thread() is not threading.main_thread():
        raise Internal("Forks are bound from the main thread only")
    parent = os.getpid()

    def in_child() -> None:
        set_death_signal()
        # The parent may have died before the signal was set; then nothing would ever end this process.
        if os.getppid() != parent:
            os._exit(1)
        for number in close_fds:
            os.close(number)

    os.register_at_fork(after_in_child=in_child)
