"""A process that vLLM forks must not outlive its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import os, sys, time
from refit_bridge.receiver.plugin import die_with_parent
if sys.argv[1] == "1":
    die_with_parent()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_forked_children_die_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "1"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _alive(child)
    parent.kill()
    parent.wait(5)
    end = time.monotonic() + 5
    while _alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
