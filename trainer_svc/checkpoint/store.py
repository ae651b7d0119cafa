"""Directories ``step_N`` that are complete or invisible.

Invariants
- A checkpoint is written to ``tmp_step_N``, every file synced, then its manifest (sizes and SHA-256), then
  renamed. Only a directory whose manifest is there and whose files have the promised sizes is a candidate.
- Writing never touches an older checkpoint before the new one is complete; what failed leaves nothing behind.
- Deleting renames first, so that a half-deleted directory is never a candidate.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.errors import Corrupt, Exhausted, Internal
from services.runtime.home import sync_directory, write_atomic
from services.runtime.logs import get_logger
from trainer_svc.checkpoint.files import disk_is_full, remove_tree, sync_file

MANIFEST = "manifest.json"
LATEST = "latest_checkpoint_status.json"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of ``step`` completed steps at ``path``."""

    step: int
    path: Path

    def manifest(self) -> dict[str, dict[str, Any]]:
        """Relative file name -> {"bytes", "sha256"}."""
        loaded: dict[str, dict[str, Any]] = json.loads((self.path / MANIFEST).read_text())["files"]
        return loaded

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object in the checkpoint."""
        loaded: dict[str, Any] = json.loads((self.path / name).read_text())
        return loaded

    def verify(self) -> None:
        """Raise Corrupt naming the first file whose content is not what was written."""
        for name, promised in self.manifest().items():
            if _sha256(self.path / name) != promised["sha256"]:
                raise Corrupt(
                    f"{name} is damaged", where=str(self.path), do="Delete this checkpoint.", reason="DAMAGED"
                )


class CheckpointStore:
    """The checkpoints below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def candidates(self) -> list[Checkpoint]:
        """Complete checkpoints, newest first."""
        found = [
            Checkpoint(int(match.group(1)), path)
            for path in self.root.glob("step_*")
            if (match := _STEP.fullmatch(path.name))
        ]
        return sorted((each for each in found if _complete(each)), key=lambda each: -each.step)

    def find(self, step: int) -> Checkpoint | None:
        """The complete checkpoint of ``step``."""
        return next((each for each in self.candidates() if each.step == step), None)

    def write(self, step: int, fill: Callable[[Path], None]) -> Checkpoint:
        """Write ``step_N`` by ``fill(folder)``; raises Exhausted on a full disk, having changed nothing."""
        staged = self.root / f"tmp_step_{step}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            remove_tree(staged)
            staged.mkdir()
            fill(staged)
            _seal(staged, step)
            path = self._publish(staged, step)
        except Exception as exc:
            full = disk_is_full(exc, self.root)
            remove_tree(staged)
            raise _failure(exc, self.root, full=full) from exc
        write_atomic(self.root / LATEST, json.dumps({"last_checkpoint_step": step}))
        return Checkpoint(step, path)

    def keep(self, steps: Iterable[int]) -> None:
        """Delete all checkpoints but those of ``steps``, and what earlier processes left unfinished."""
        kept = set(steps)
        for each in self.candidates():
            if each.step not in kept:
                self._discard(each.path)
        for leftover in [*self.root.glob("tmp_step_*"), *self.root.glob("old_step_*")]:
            remove_tree(leftover)

    def _publish(self, staged: Path, step: int) -> Path:
        path = self.root / f"step_{step}"
        if path.exists():
            # Only a damaged one stands here: a complete one is never written again.
            self._discard(path)
        staged.rename(path)
        sync_directory(self.root)
        return path

    def _discard(self, path: Path) -> None:
        old = path.with_name(f"old_{path.name}")
        remove_tree(old)
        path.rename(old)
        remove_tree(old)
        get_logger("trainer").info("checkpoint removed", path=str(path))


def _seal(folder: Path, step: int) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync_file(path)
    listed = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    write_atomic(folder / MANIFEST, json.dumps({"step": step, "files": listed}, indent=1))
    for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_directory(inner)


def _complete(checkpoint: Checkpoint) -> bool:
    try:
        manifest = checkpoint.manifest()
    except (OSError, ValueError, KeyError):
        return False
    sizes = {name: promised["bytes"] for name, promised in manifest.items()}
    return all(_size(checkpoint.path / name) == size for name, size in sizes.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _failure(exc: Exception, root: Path, *, full: bool) -> Exception:
    kept = "Earlier checkpoints are untouched"
    if full:
        free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0.0
        return Exhausted(
            f"No room for a checkpoint ({free:.0f} MiB free). {kept}",
            where=str(root),
            do="Free space there, or lower checkpointing.keep_top_k.",
            reason="DISK_FULL",
        )
    if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return Exhausted(f"Cannot write a checkpoint: {exc.strerror}. {kept}", where=str(root))
    text = (str(exc) or type(exc).__name__).splitlines()[0]
    return Internal(f"Cannot write a checkpoint: {text}. {kept}", where=str(root))
