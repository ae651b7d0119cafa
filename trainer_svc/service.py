"""``headrace serve trainer``: launches the torchrun job and lives exactly as long as it.

Invariants
- This process imports neither torch nor transformers; it checks its settings before anything is started.
- Nothing but rank 0's gRPC server listens, and that on loopback.
- torchrun dies with this process (death signal), the ranks with torchrun.
- SIGTERM goes to the ranks, which drain and end with status 0; torchrun then ends by itself. A second
  SIGTERM kills.
- Status 2 means bad input, as for every service.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import psutil

from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.ports import ReservedPort
from services.runtime.settings import split_address
from services.runtime.spawn import wrap
from trainer_svc.parallel.world import check_size
from trainer_svc.settings import TrainerSettings

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the trainer until it ends; returns its exit status."""
    try:
        settings = TrainerSettings.load()
        check_size(settings.nproc)
        _check_port(settings)
    except HeadraceError as exc:
        print(f"trainer: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, InvalidInput) else 1
    with tempfile.TemporaryDirectory(prefix="headrace-trainer-") as folder:
        return _supervise(torchrun(settings, Path(folder)), environment(settings))


def torchrun(settings: TrainerSettings, folder: Path) -> list[str]:
    """The command of the job: one machine, no restarts of its own, a rendezvous by a file in ``folder``.

    By a file, because torch's TCPStore takes connections from everywhere, without asking who it is.
    """
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=1", f"--nproc-per-node={settings.nproc}", "--max-restarts=0", f"--local-addr={LOOPBACK}",
        "--rdzv-backend=c10d", "--rdzv-id=headrace", f"--rdzv-endpoint={folder / 'rendezvous'}",
        "--rdzv-conf=store_type=file",
        "-m", "trainer_svc.rank",
    ]  # fmt: skip


def environment(settings: TrainerSettings) -> Mapping[str, str]:
    """This process's environment, with what ranks need to find code, threads and parent."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        # Else the agent opens a TCPStore even beside a rendezvous by file.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(settings.cpu_threads),
        "HEADRACE_LAUNCHER_PID": str(os.getpid()),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _supervise(command: list[str], env: Mapping[str, str]) -> int:
    """Start the job, pass requests to stop on, and wait for its end."""
    # torchrun stays in the supervisor's process group; it gives each rank a session of its own.
    job = subprocess.Popen(wrap(command), env=env)
    stopping = _Stopping(job)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopping)
    status = job.wait()
    if stopping.asked:
        return 0
    return status if status in (0, 2) else 1


def _check_port(settings: TrainerSettings) -> None:
    """Say that a port is taken now: from a rank it would drown in torchrun's own report."""
    host, port = split_address(settings.listen)
    if port and not settings.port_handed_over:
        ReservedPort.explicit(host, port).close()


class _Stopping:
    """Passes a request to stop on: first to the ranks, then to all."""

    def __init__(self, job: subprocess.Popen[bytes]) -> None:
        self._job = job
        self.asked = False
        """Whether somebody asked the job to end."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ranks = _ranks(self._job.pid)
        if self.asked or not ranks:
            self._job.kill()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        self.asked = True


def _ranks(agent: int) -> list[psutil.Process]:
    try:
        return psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    sys.exit(main())
