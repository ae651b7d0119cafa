"""Traces: OpenTelemetry spans, W3C context on the wire, one JSON line per span in a local file.

Invariants
- Ids come from ``os.urandom``: seeding ``random`` for reproducibility must not repeat them.
- Recording never blocks the caller: queues are bounded, and what does not fit is dropped and counted.
- A span goes to ``runs/RUN/traces/<service>-<pid>.jsonl`` by its attribute ``headrace.run``, without one to
  ``$HOME/traces``; and to a collector (:mod:`services.runtime.otlp`), by a queue of its own.
- Until :func:`setup` is called spans still carry context but are written nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

from services.runtime import otlp
from services.runtime.ids import current_ids
from services.runtime.resource import resource
from services.runtime.trace_files import JsonlExporter, UrandomIds, read_spans

__all__ = [
    "context_from",
    "current_traceparent",
    "dropped_spans",
    "flush",
    "link_from",
    "read_spans",
    "setup",
    "span",
    "traceparent_of",
]

QUEUE_SPANS = 16384
BATCH_SPANS = 512
EXPORT_EVERY_MS = 500
MAX_LINKS = 1 << 17
DESTINATIONS = ("file", "collector")


class _CountingProcessor(BatchSpanProcessor):
    """Counts ended spans, so that drops are known without looking into the queue."""

    ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.ended += 1
        super().on_end(span)


class _State:
    """This process's tracer; replaced as a whole by :func:`setup`."""

    def __init__(self, service: str, home: Path | None) -> None:
        ids: IdGenerator = UrandomIds()
        self.provider = TracerProvider(
            id_generator=ids,
            resource=resource(service),
            shutdown_on_exit=False,
            # A train step links to every sample that it used; the SDK's default keeps the first 128.
            span_limits=SpanLimits(max_links=MAX_LINKS),
        )
        self.sent: otlp.CountingExporter | None = None
        self.collector: _CountingProcessor | None = None
        self.exporter: JsonlExporter | None = None
        self.processor: _CountingProcessor | None = None
        self.stalled = False
        """The last flush was not over in time."""
        if home is not None:
            self.exporter = JsonlExporter(service, home)
            self.processor = _CountingProcessor(
                self.exporter, QUEUE_SPANS, EXPORT_EVERY_MS, BATCH_SPANS, export_timeout_millis=5000
            )
            self.provider.add_span_processor(self.processor)
            self._to_collector()
        self.tracer = self.provider.get_tracer("headrace")

    def _to_collector(self) -> None:
        """A second, independent queue: a collector that is slow or dead holds up no file."""
        exporter = otlp.span_exporter()
        if exporter is not None:
            self.sent = otlp.CountingExporter(exporter)
            # Sized by OTEL_BSP_*, by default far smaller than the file's: one that nobody empties stays full.
            self.collector = _CountingProcessor(self.sent)
            self.provider.add_span_processor(self.collector)


_state = _State("headrace", None)


def setup(service: str, home: Path) -> None:
    """Write this process's spans below ``home``. Calling it again flushes and replaces the former setup."""
    global _state
    import atexit

    former, _state = _state, _State(service, home)
    if former.processor is None:
        atexit.register(_flush_at_exit)
    else:
        _bounded(former.provider.shutdown, 2.0)


@contextmanager
def span(
    name: str,
    *,
    parent: Context | None = None,
    links: Iterable[Link | None] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
    **attrs: AttributeValue,
) -> Iterator[Span]:
    """A span around the block; run, group and sample of the context become ``headrace.*`` attributes.

    ``parent`` is a context of :func:`context_from`; without it the current span is the parent. An exception
    marks the span as failed and passes through.
    """
    merged: dict[str, AttributeValue] = {f"headrace.{key}": value for key, value in current_ids().items()}
    merged.update(attributes or {})
    merged.update(attrs)
    found = [link for link in links if link is not None]
    with _state.tracer.start_as_current_span(
        name, context=parent, kind=kind, attributes=merged, links=found
    ) as active:
        yield active


def current_traceparent() -> str:
    """W3C ``traceparent`` of the current span; empty when there is none."""
    return traceparent_of(trace.get_current_span().get_span_context())


def traceparent_of(context: SpanContext) -> str:
    """W3C ``traceparent`` of ``context``; empty when it is not valid."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def context_from(traceparent: str) -> Context | None:
    """A parent context from a W3C ``traceparent``; None when it is absent or malformed."""
    remote = _parse(traceparent)
    return None if remote is None else trace.set_span_in_context(NonRecordingSpan(remote), Context())


def link_from(traceparent: str, **attrs: AttributeValue) -> Link | None:
    """A link to the span of a W3C ``traceparent``; None when it is absent or malformed."""
    remote = _parse(traceparent)
    return None if remote is None else Link(remote, attrs)


def flush(timeout: float = 2.0) -> bool:
    """Write what is queued; False when that took longer than ``timeout`` seconds."""
    if _state.processor is None:
        return True
    # The file's processor comes first; a collector that does not answer costs what is left of the time.
    _state.stalled = not _bounded(_state.provider.force_flush, timeout)
    return not _state.stalled


def _flush_at_exit() -> None:
    """A collector that a service has waited for in vain as it stopped is not waited for again."""
    if _state.stalled and _state.processor is not None:
        _bounded(_state.processor.force_flush, 2.0)
    else:
        flush()


def dropped_spans(destination: str = "file") -> int:
    """Spans lost so far on their way to ``destination`` ("file" or "collector"): the queue was full, or
    nobody took them. Exact after :func:`flush`."""
    if destination == "collector":
        if _state.collector is None or _state.sent is None:
            return 0
        return max(0, _state.collector.ended - _state.sent.exported)
    if _state.processor is None or _state.exporter is None:
        return 0
    return max(0, _state.processor.ended - _state.exporter.written)


def _parse(traceparent: str) -> SpanContext | None:
    parts = traceparent.split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    try:
        ids = int(parts[1], 16), int(parts[2], 16), TraceFlags(int(parts[3], 16))
    except ValueError:
        return None
    context = SpanContext(ids[0], ids[1], is_remote=True, trace_flags=ids[2])
    return context if context.is_valid else None


def _bounded(action: Any, timeout: float) -> bool:
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python 3.12 starts no thread once the interpreter ends: written here, what is left is little.
        action()
        return True
    thread.join(timeout)
    return not thread.is_alive()
