"""Entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes.

Invariants
- Registering is idempotent and imports nothing heavy: the engine's class is loaded when it is first used.
- With ``HEADRACE_DEATH_SIGNAL=1`` no child of vLLM outlives its parent: death signals are not inherited, so
  each spawned or forked child asks for its own. The signal follows the *thread* that started the child:
  start engines from a thread that lives as long as the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from services.runtime.spawn import set_death_signal

BACKEND = "headrace"
DEATH_SIGNAL = "HEADRACE_DEATH_SIGNAL"
_forks_watched = False


def register() -> None:
    """Make the backend ``headrace`` known to vLLM's weight-transfer factory."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    # Registering a name twice raises, and vLLM has no question "is it there?".
    if BACKEND not in Factory._registry:  # noqa: SLF001
        Factory.register_engine(BACKEND, "refit_bridge.receiver.engine", "HeadraceWeightTransferEngine")
    if os.environ.get(DEATH_SIGNAL) == "1":
        die_with_parent()


def die_with_parent() -> None:
    """Tie this process to its parent when vLLM started it, and every process that it forks to itself."""
    global _forks_watched
    if multiprocessing.parent_process() is not None:
        set_death_signal()
    if not _forks_watched:
        _forks_watched = True
        # A forked EngineCore inherits loaded plugins and never calls register() again.
        os.register_at_fork(before=_remember_parent, after_in_child=_after_fork)


_parent = 0


def _remember_parent() -> None:
    global _parent
    _parent = os.getpid()


def _after_fork() -> None:
    set_death_signal()
    if os.getppid() != _parent:
        os.kill(os.getpid(), signal.SIGKILL)
