"""Checkpoints are complete or invisible: kills, full disks and damage included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.errors import Conflict, Corrupt, Exhausted, Internal
from trainer_svc.checkpoint.directory import replace_directory
from trainer_svc.checkpoint.retention import steps_to_keep
from trainer_svc.checkpoint.store import CheckpointStore
from trainer_svc.config import CheckpointConfig

ROOT = Path(__file__).resolve().parents[3]


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    return store.write(step, lambda folder: _fill(folder, text)).path


def _fill(folder: Path, text: str) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text(text)


def test_what_was_written_is_found_newest_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "deep" / "checkpoints")
    for step in (2, 10, 4):
        write(store, step)
    assert [each.step for each in store.candidates()] == [10, 4, 2]
    store.candidates()[0].verify()
    assert store.find(4) is not None
    assert store.find(3) is None


@pytest.mark.parametrize("damage", ["no manifest", "cut file", "missing file", "broken manifest"])
def test_an_incomplete_directory_is_no_candidate(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    path = write(store, 2)
    if damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "broken manifest":
        (path / "manifest.json").write_text("{")
    elif damage == "cut file":
        (path / "model" / "weights").write_text("weig")
    else:
        (path / "model" / "weights").unlink()
    assert [each.step for each in store.candidates()] == [1]
    assert write(store, 2) == path
    assert [each.step for each in store.candidates()] == [2, 1]


def test_damage_of_the_same_size_is_found_by_verify(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = write(store, 1)
    (path / "model" / "weights").write_text("weighTs")
    with pytest.raises(Corrupt, match="model/weights is damaged"):
        store.candidates()[0].verify()


def test_a_failed_write_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def fail(folder: Path) -> None:
        _fill(folder, "half")
        raise RuntimeError("the writer broke\nsecond line")

    with pytest.raises(Internal, match=r"the writer broke\. Earlier checkpoints are untouched") as caught:
        store.write(2, fail)
    assert "second line" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpoint_status.json", "step_1"]


FULL = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from services.runtime.errors import Exhausted
from trainer_svc.checkpoint.store import CheckpointStore

def by_safetensors(folder): save_file({"w": torch.zeros(1 << 16)}, folder / "w.safetensors")
def by_file(folder):
    with (folder / "o.pt").open("wb") as file: torch.save({"w": torch.zeros(1 << 16)}, file)
store = CheckpointStore(Path(sys.argv[1]))
store.write(1, lambda folder: (folder / "a").write_text("a"))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
for fill in (by_safetensors, by_file):
    try:
        store.write(2, fill)
    except Exhausted as exc:
        print(exc.reason, exc)
"""


def test_a_full_disk_leaves_the_former_checkpoint_and_one_clear_error(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the same writers fail in the same calls."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("DISK_FULL No room for a checkpoint") for line in lines)
    assert [each.step for each in CheckpointStore(tmp_path).candidates()] == [1]
    assert not list(tmp_path.glob("tmp_*"))


SLOW = """
import sys, time
from pathlib import Path
from trainer_svc.checkpoint.store import CheckpointStore

def slow(folder):
    (folder / "a").write_text("a")
    print("half", flush=True)
    time.sleep(60)
store = CheckpointStore(Path(sys.argv[1]))
store.write(1, lambda folder: (folder / "a").write_text("a"))
store.write(2, slow)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_only_complete_ones(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    store = CheckpointStore(tmp_path)
    assert (tmp_path / "tmp_step_2").is_dir()
    assert [each.step for each in store.candidates()] == [1]
    write(store, 2)
    store.keep([2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpoint_status.json", "step_2"]


def config(top: int | None, metric: str | None = None, *, higher: bool = True) -> CheckpointConfig:
    return CheckpointConfig(save_optimizer=True, keep_top_k=top, metric=metric, higher_is_better=higher)


def test_retention_is_the_latest_and_the_best() -> None:
    known = [(step, {"val:accuracy": value}) for step, value in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1))]
    assert steps_to_keep(known, config(2)) == {3, 4}
    assert steps_to_keep(known, config(None)) == {1, 2, 3, 4}
    assert steps_to_keep(known, config(1, "val:accuracy")) == {3, 4}
    assert steps_to_keep(known, config(2, "val:accuracy", higher=False)) == {1, 4}
    assert steps_to_keep([*known, (5, {})], config(2, "val:accuracy")) == {2, 3, 5}
    assert steps_to_keep([], config(2)) == set()


def test_an_export_never_replaces_what_is_no_export(tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter.txt").write_text("years of work")
    with pytest.raises(Conflict):
        replace_directory(target, lambda folder: None)
    assert (target / "chapter.txt").read_text() == "years of work"


def test_a_failed_export_keeps_the_former_one(tmp_path: Path) -> None:
    target = tmp_path / "export"
    replace_directory(target, lambda folder: (folder / "config.json").write_text("{}") and None)

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(Exhausted):
        replace_directory(target, fail)
    assert json.loads((target / "config.json").read_text()) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
