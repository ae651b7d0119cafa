"""Logs are JSON lines with the ids of the work, whoever writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import logging, pathlib, sys
from services.runtime import logs
logs.configure("gym", level="info", file=pathlib.Path(sys.argv[1]))
log = logs.get_logger("agent")
with logs.bind_ids(run="r1", sample=3):
    log.info("turn", tokens=5, odd=pathlib.Path("x"))
    logging.getLogger("asyncio").warning("slow %s", "callback")
log.debug("hidden")
try:
    1 / 0
except ZeroDivisionError:
    log.error("failed", exc_info=True)
"""


def test_lines(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "gym.log"
    subprocess.run([sys.executable, "-c", CODE, file], check=True, cwd=ROOT, timeout=20)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["turn", "slow callback", "failed"]
    assert (
        lines[0].items()
        >= {"service": "gym", "run": "r1", "sample": "3", "level": "info", "odd": "x"}.items()
    )
    assert (
        lines[1].items() >= {"service": "gym", "run": "r1", "logger": "asyncio", "level": "warning"}.items()
    )
    assert "run" not in lines[2]
    assert "ZeroDivisionError" in lines[2]["exception"]
