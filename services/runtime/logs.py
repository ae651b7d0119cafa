"""Structured logs: one JSON object per line, to stderr or a file, with run, group and sample ids.

Invariants: standard-library records (grpc, asyncio, redis) come out in the same form; a log call never
raises into the caller's work; secrets are the caller's business and are never added here.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from io import TextIOBase
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from services.runtime.ids import bind_ids, current_ids

__all__ = ["bind_ids", "configure", "get_logger"]


def configure(service: str, *, level: str = "info", file: Path | None = None) -> None:
    """Send this process's logs to ``file`` (appended) or stderr. Call once, at start."""
    stream = _open(file)
    number = logging.getLevelNamesMapping()[level.upper()]

    def add_context(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {"service": service, **current_ids(), **event}

    shared: list[Any] = [
        add_context,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(serializer=_dumps)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    _route_stdlib(stream, number, shared, render)


def get_logger(name: str = "") -> Any:
    """A structlog logger: ``log.info("event", key=value)``."""
    return structlog.get_logger(source=name) if name else structlog.get_logger()


class _Lines(TextIOBase):
    """A stream that counts the lines it could not write (full disk) instead of failing the caller."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner
        self.lost = 0

    def write(self, text: str, /) -> int:
        try:
            return self._inner.write(text)
        except OSError:
            self.lost += 1
            return 0

    def flush(self) -> None:
        try:
            self._inner.flush()
        except OSError:
            self.lost += 1


def _open(file: Path | None) -> TextIO:
    if file is None:
        return cast(TextIO, _Lines(sys.stderr))
    file.parent.mkdir(parents=True, exist_ok=True)
    return cast(TextIO, _Lines(file.open("a", buffering=1, encoding="utf-8")))


def _route_stdlib(stream: TextIO, level: int, shared: list[Any], render: Any) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))


def _dumps(event: Any, **kwargs: Any) -> str:
    return json.dumps(event, **{**kwargs, "default": str})  # a log call must not fail over a value's type
