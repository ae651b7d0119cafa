"""A directory that is replaced as a whole (exports).

Invariant: a reader sees the old directory or the new one; a directory that is no export is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.runtime.errors import Conflict, Exhausted
from services.runtime.home import sync_directory
from trainer_svc.checkpoint.files import disk_is_full, remove_tree, sync_file


def replace_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Write ``target`` by ``fill(folder)``; raises Conflict over something else, Exhausted on a full disk."""
    if (
        target.exists()
        and not (target / "config.json").is_file()
        and (not target.is_dir() or any(target.iterdir()))
    ):
        raise Conflict(
            "The path holds something that is no model", where=str(target), do="Choose another path."
        )
    staged = target.with_name(f".tmp_{target.name}")
    try:
        remove_tree(staged)
        staged.mkdir(parents=True)
        fill(staged)
        for path in staged.iterdir():
            sync_file(path)
        _swap(staged, target)
    except Exception as exc:
        full = disk_is_full(exc, target.parent)
        remove_tree(staged)
        if full:
            raise Exhausted("No room for the export", where=str(target), do="Free space there.") from exc
        raise


def _swap(staged: Path, target: Path) -> None:
    old = target.with_name(f".old_{target.name}")
    remove_tree(old)
    if target.exists():
        target.rename(old)
    staged.rename(target)
    sync_directory(target.parent)
    remove_tree(old)
