"""Supervision with real processes: restarts, limits, order, sweeping, and death with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.runtime.errors import HeadraceError, Internal, InvalidInput, NotReady
from services.runtime.spawn import wrap
from services.runtime.supervise import ProcessEvent, ProcessSpec, Supervisor

ROOT = Path(__file__).parents[3]
READY = (
    "import json,os,sys,time; open(sys.argv[1],'w').write(json.dumps({'address':'a:1','pid':os.getpid()}));"
)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def spec(tmp_path: Path, name: str, code: str, *, ready: bool = False, **more: Any) -> ProcessSpec:
    file = tmp_path / f"{name}.ready" if ready else None
    argv = [sys.executable, "-c", (READY if ready else "") + code, *([str(file)] if file else [])]
    return ProcessSpec(name, argv, tmp_path / f"{name}.log", ready_file=file, **more)


async def polled(supervisor: Supervisor, condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await supervisor.poll()
            await asyncio.sleep(0.02)


async def test_killed_process_is_restarted_and_ready_again(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    supervisor = Supervisor(events.append)
    await supervisor.start_all([spec(tmp_path, "svc", "time.sleep(60)", ready=True)])
    (before,) = supervisor.status()
    assert before.ready
    assert supervisor.ready_record("svc") == {"address": "a:1", "pid": before.pid}
    os.kill(before.pid, signal.SIGKILL)
    await polled(supervisor, lambda: supervisor.status()[0].restarts == 1 and supervisor.status()[0].ready)
    await supervisor.stop_all()
    assert [event.kind for event in events] == ["started", "ready", "exited", "started", "ready", "stopped"]
    assert "SIGKILL" in events[2].detail
    assert all(gone(event.pid) for event in events)


async def test_crash_loop_fails_the_stack_with_the_log(tmp_path: Path) -> None:
    supervisor = Supervisor(max_restarts=2)
    await supervisor.start_all([spec(tmp_path, "svc", "print('no disk left'); raise SystemExit(7)")])
    with pytest.raises(Internal, match=r"ended 3 times.*status 7.*no disk left") as caught:
        await polled(supervisor, lambda: False)
    assert caught.value.reason == "CRASH_LOOP"
    await supervisor.stop_all()


async def test_bad_input_is_not_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = "print('port 7 is in use'); raise SystemExit(2)"
    refuses = ProcessSpec(
        "svc", [sys.executable, "-c", code], tmp_path / "svc.log", ready_file=tmp_path / "never"
    )
    with pytest.raises(InvalidInput, match="port 7 is in use"):
        await supervisor.start_all([refuses])
    await supervisor.stop_all()


async def test_late_start_names_the_log(tmp_path: Path) -> None:
    supervisor = Supervisor()
    late = ProcessSpec(
        "svc",
        [sys.executable, "-uc", "print('loading'); import time; time.sleep(60)"],
        tmp_path / "svc.log",
        ready_file=tmp_path / "never",
        start_timeout=1.0,
    )
    with pytest.raises(NotReady, match=r"within 1 s.*loading"):
        await supervisor.start_all([late])
    pid = supervisor.status()[0].pid
    await supervisor.stop_all()
    assert gone(pid)


async def test_stop_goes_by_stage_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    supervisor = Supervisor(events.append)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    await supervisor.start_all(
        [
            spec(tmp_path, "last", "time.sleep(60)", ready=True, stop_stage=1),
            spec(tmp_path, "deaf", deaf, ready=True, stop_timeout=0.3),
        ]
    )
    await asyncio.sleep(0.3)
    await supervisor.stop_all()
    assert [event.name for event in events if event.kind == "stopped"] == ["deaf", "last"]
    assert [status.exit_status for status in supervisor.status()] == [-15, -9]


async def test_grandchildren_of_a_dead_process_are_swept(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = "import subprocess; p = subprocess.Popen(['sleep','60']); print(p.pid, flush=True); time.sleep(60)"
    await supervisor.start_all([spec(tmp_path, "svc", code, ready=True)])
    log = tmp_path / "svc.log"
    until(lambda: log.exists() and log.read_text().strip())
    grandchild = int(log.read_text())
    assert not gone(grandchild)
    os.kill(supervisor.status()[0].pid, signal.SIGKILL)
    await polled(supervisor, lambda: gone(grandchild), 5)
    await supervisor.stop_all()


ESCAPED = """
import subprocess, sys, time
for session in (True, False):
    p = subprocess.Popen(["sleep", "60"], start_new_session=session, process_group=None if session else 0)
    print(p.pid, flush=True)
time.sleep(60)
"""


async def test_descendants_that_left_group_or_session_are_swept(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start_all([ProcessSpec("svc", [sys.executable, "-c", ESCAPED], tmp_path / "log")])
    until(lambda: len((tmp_path / "log").read_text().split()) == 2)
    pids = [int(part) for part in (tmp_path / "log").read_text().split()]
    assert not any(gone(pid) for pid in pids)
    os.kill(supervisor.status()[0].pid, signal.SIGKILL)
    await polled(supervisor, lambda: all(gone(pid) for pid in pids), 5)
    await supervisor.stop_all()


async def test_one_off_process(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start_all([spec(tmp_path, "task", "raise SystemExit(3)", restart=False)])
    assert await supervisor.wait("task", 10) == 3
    assert not supervisor.status()[0].running
    await supervisor.stop_all()


async def test_spawning_from_another_thread_is_refused(tmp_path: Path) -> None:
    caught: list[HeadraceError] = []

    def attempt() -> None:
        try:
            asyncio.run(Supervisor().start_all([spec(tmp_path, "svc", "pass")]))
        except HeadraceError as exc:
            caught.append(exc)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(10)
    assert "main thread" in str(caught[0])


PARENT = """
import asyncio, pathlib, sys, time
from services.runtime.supervise import ProcessSpec, Supervisor
async def main():
    folder = pathlib.Path(sys.argv[1])
    supervisor = Supervisor()
    await supervisor.start_all([
        ProcessSpec(name, [sys.executable, "-c", sys.argv[2]], folder / name) for name in "ab"
    ])
    await asyncio.sleep(1)
    print(*[status.pid for status in supervisor.status()], flush=True)
    await supervisor.watch()
asyncio.run(main())
"""


def test_sigkill_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path, ESCAPED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(part) for part in parent.stdout.readline().split()]
    for name in "ab":
        pids += [int(part) for part in (tmp_path / name).read_text().split()]
    assert len(pids) == 6
    assert not any(gone(pid) for pid in pids)
    parent.kill()
    parent.communicate(timeout=5)
    until(lambda: all(gone(pid) for pid in pids), 5)


def test_wrapper_notices_a_parent_that_is_gone() -> None:
    done = subprocess.run(wrap(["echo", "never"], parent=1), capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout) == (1, "")


def test_wrapper_becomes_the_command() -> None:
    process = subprocess.Popen(
        wrap([sys.executable, "-c", "import os; print(os.getpid())"]), stdout=subprocess.PIPE, text=True
    )
    assert int(process.communicate(timeout=10)[0]) == process.pid
    missing = subprocess.run(wrap(["no-such-program"]), capture_output=True, text=True, timeout=10)
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
