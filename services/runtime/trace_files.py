"""The files behind :mod:`services.runtime.tracing`: one JSON object per line and span.

Invariants: a line is written whole with one ``write``; files are appended to, one per process, so nobody
else writes to them; a file that cannot be written costs its spans and never raises.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, StatusCode

from services.runtime.home import RUN_ID, Home

RUN_ATTRIBUTE = "headrace.run"


class UrandomIds(IdGenerator):
    """Ids from the kernel, independent of ``random.seed``."""

    def generate_span_id(self) -> int:
        """64 random bits, never 0."""
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        """128 random bits, never 0."""
        return int.from_bytes(os.urandom(16), "big") or 1


class JsonlExporter(SpanExporter):
    """Appends spans to ``<service>-<pid>.jsonl`` of the run that they belong to."""

    def __init__(self, service: str, home: Path) -> None:
        self._service = service
        self._home = Home(home)
        self.written = 0
        """Spans on disk."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append ``spans``; FAILURE when a file could not be written."""
        lines: dict[str, list[str]] = defaultdict(list)
        for span in spans:
            lines[_run_of(span)].append(json.dumps(to_record(span, self._service), default=str))
        for run, texts in lines.items():
            if not self._append(run, texts):
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _append(self, run: str, texts: list[str]) -> bool:
        folder = self._home.run(run).traces if run else self._home.traces
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Named at export, not at start: a forked child must not append to its parent's file.
            with (folder / f"{self._service}-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
                file.write(("\n".join(texts) + "\n").encode())
        except OSError:
            return False  # counted by tracing.dropped_spans
        self.written += len(texts)
        return True

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


def to_record(span: ReadableSpan, service: str) -> dict[str, Any]:
    """One span as a JSON object; ids are lower-case hex, times are nanoseconds since the epoch."""
    context = _context(span)
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "name": span.name,
        "service": service,
        "kind": span.kind.name.lower(),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
        "links": [
            {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
            for link in span.links
        ],
        "status": "error" if span.status.status_code is StatusCode.ERROR else "ok",
        "status_message": span.status.description,
    }


def read_spans(folder: Path) -> list[dict[str, Any]]:
    """All spans below ``folder`` (a run's directory), by start time; a torn last line is left out."""
    found: list[dict[str, Any]] = []
    for file in sorted(folder.glob("**/*.jsonl" if folder.name == "traces" else "traces/*.jsonl")):
        found.extend(json.loads(line) for line in file.read_bytes().split(b"\n")[:-1])
    return sorted(found, key=lambda record: int(record["start_ns"]))


def _context(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None, "an ended span has a context"
    return context


def _run_of(span: ReadableSpan) -> str:
    attributes: Mapping[str, Any] = span.attributes or {}
    run = str(attributes.get(RUN_ATTRIBUTE, ""))
    return run if RUN_ID.fullmatch(run) else ""
