"""A run whose weight transfer is damaged on purpose, and what must hold after it.

``HEADRACE_FAULT_REFIT`` is the hook of ``refit_bridge/faults.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.buffer.payload import unpack
from services.runtime import redis
from tests.chaos.world import PROMPTS, SAMPLES
from tests.e2e.command import Home

PATIENCE_S = 150
SHORT = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "grpo.max_num_steps=3")


def failed_run(recipe: Path, home: Home, fault: str) -> dict[str, Any]:
    """A short run of ``recipe`` under ``fault``; its summary."""
    done = home.headrace("run", str(recipe), *SHORT, "--json", timeout=PATIENCE_S, HEADRACE_FAULT_REFIT=fault)
    assert done.status == 1, done.stderr
    summary: dict[str, Any] = done.json
    assert summary["status"] == "failed"
    return summary


def check_blocked(home: Home, summary: dict[str, Any], tensor: str) -> None:
    """The error names ``tensor``, nobody served version 1, and the books balance."""
    assert tensor in summary["error"], summary["error"]
    assert served_versions(home, summary["run_id"]) == {0}
    audit = home.headrace("runs", "audit", "last", "--json", timeout=60)
    assert audit.status == 0, audit.stderr
    assert audit.json["balanced"] is True
    trained = audit.json["books"]["train"]["groups"]
    assert (trained["dispatched"], trained["trained"], trained["open"]) == (PROMPTS, PROMPTS, 0)
    assert home.left() == []


def served_versions(home: Home, run: str) -> set[int]:
    """Version numbers of all trajectories in the store."""
    found: set[int] = set()
    with redis.acquire(home.path) as handle, redis.connect_sync(handle.url) as client:
        keys = list(client.scan_iter(match=f"hr:{{{run}}}:t:train:*", count=1000))
        assert len(keys) == PROMPTS * SAMPLES
        for key in keys:
            _, group, _ = key.decode().rsplit(":", 2)
            prompt = client.get(f"hr:{{{run}}}:p:train:{group}")
            found.update(version.number for version in unpack(client.get(key), prompt).policy_versions)
    return found
