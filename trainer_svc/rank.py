"""One rank of the trainer's torchrun job: ``python -m trainer_svc.rank``.

Invariants
- gRPC answers before torch is imported: health tells life within about a second of the start.
- The rank dies with its torchrun agent (death signal), and so never outlives the launcher.
- SIGTERM drains: calls in flight end within ``drain_seconds``, then the process leaves even if a command
  still runs (a checkpoint that is being written stays invisible).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from services.runtime import logs, metrics, spawn, tracing
from services.runtime.errors import HeadraceError, InvalidInput
from trainer_svc.app import TrainerApp
from trainer_svc.commands import Commands, Snapshot
from trainer_svc.parallel.world import World, check_size
from trainer_svc.serving import ServingThread
from trainer_svc.settings import TrainerSettings

if TYPE_CHECKING:
    from protos.headrace.v1 import buffer_pb2
    from trainer_svc.trainer import Trainer

LAUNCHER_PID = "HEADRACE_LAUNCHER_PID"
FETCH_WAIT_SECONDS = 320.0
# After the drain, for a command that still runs.
LEAVE_SECONDS = 1.0


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    spawn.set_death_signal()
    if not _launcher_lives():
        return 1
    try:
        settings = TrainerSettings.load()
        check_size(World.from_env().size)
        logs.configure("trainer", level=settings.log_level, file=settings.log_file)
        tracing.setup("trainer", settings.home)
        metrics.setup("trainer", settings.metrics_listen if World.from_env().rank == 0 else "")
        return _run(settings)
    except HeadraceError as exc:
        print(f"trainer: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, InvalidInput) else 1
    finally:
        tracing.flush()
        metrics.shutdown()


def _run(settings: TrainerSettings) -> int:
    commands = Commands()
    snapshot = Snapshot(f"{os.getpid()}-{os.urandom(6).hex()}")
    app = TrainerApp(commands, snapshot)
    serving = ServingThread(app, settings)
    address = serving.start()
    logs.get_logger("trainer").info("serving", address=address, pid=os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: serving.begin_stop())
    threading.Thread(target=_leave, args=(serving, commands), daemon=True).start()
    trainer = _load(settings, app, serving)
    commands.run()
    trainer.close()
    return 0 if serving.error is None else 1


def _load(settings: TrainerSettings, app: TrainerApp, serving: ServingThread) -> Trainer:
    """Import what is heavy, and tell the app."""
    from trainer_svc.data.fetch import fetch_groups
    from trainer_svc.models.device import prepare_device
    from trainer_svc.trainer import Trainer

    def fetch(manifest: buffer_pb2.Manifest) -> list[buffer_pb2.TrajectoryGroup]:
        return serving.call(fetch_groups(settings.buffer, manifest), FETCH_WAIT_SECONDS)

    device = prepare_device(World.from_env().local_rank, settings.cpu_threads)
    trainer = Trainer(app.snapshot, device, fetch, app.fail)
    app.loaded(trainer)
    return trainer


def _leave(serving: ServingThread, commands: Commands) -> None:
    """Once the server has drained, end the main thread's loop; then the process, whatever still runs."""
    serving.stopped.wait()
    commands.close()
    main_thread = threading.main_thread()
    main_thread.join(LEAVE_SECONDS)
    if main_thread.is_alive() and commands.busy_with:
        logs.get_logger("trainer").warning("leaving in the middle of a command", command=commands.busy_with)
        tracing.flush()
        os._exit(0 if serving.error is None else 1)


def _launcher_lives() -> bool:
    """Whether the launcher is still the parent of the agent that started this rank."""
    import psutil

    expected = os.environ.get(LAUNCHER_PID)
    if expected is None:
        return True
    try:
        agent = psutil.Process().parent()
        return agent is not None and agent.ppid() == int(expected)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
