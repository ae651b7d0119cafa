"""Small file operations of the checkpoint store."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# safetensors reports what the system said as text only.
_OS_ERROR = re.compile(r"os error (\d+)")
_NEARLY_NOTHING = 1 << 20


def sync_file(path: Path) -> None:
    """Make the content of ``path`` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Delete ``path`` and everything below; fine when it does not exist."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def disk_is_full(exc: BaseException, folder: Path) -> bool:
    """Whether ``exc``, or what caused it, is the disk (or quota, or file size limit) being full."""
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        match = _OS_ERROR.search(str(seen))
        if match and int(match.group(1)) in _FULL:
            return True
        seen = seen.__cause__ or seen.__context__
    # torch's own writer does not say why a write failed.
    return folder.exists() and shutil.disk_usage(folder).free < _NEARLY_NOTHING
