"""Export over OTLP (gRPC), for as long as ``OTEL_EXPORTER_OTLP_ENDPOINT`` names a collector.

Invariants
- The exporters read the standard OTEL_* variables themselves (headers, certificate, compression, ...).
- One export is bounded by ``OTEL_EXPORTER_OTLP_TIMEOUT``, and by 2 s where that is not set: a collector that
  does not answer costs its own thread's time and what it does not take, nothing else.
- What goes wrong is one log line a minute, not one for each batch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

TIMEOUT_SECONDS = 2.0
QUIET_SECONDS = 60.0
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)


def enabled(signal: str) -> bool:
    """Whether ``signal`` ("traces" or "metrics") goes to a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").strip() == "none":
        return False
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "")
    return bool(own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))


def span_exporter() -> SpanExporter | None:
    """An exporter of spans; None when there is no collector."""
    if not enabled("traces"):
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    _quieten()
    return OTLPSpanExporter(timeout=_timeout("TRACES"), insecure=_insecure("TRACES"))


def metric_exporter() -> MetricExporter | None:
    """An exporter of metrics; None when there is no collector."""
    if not enabled("metrics"):
        return None
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    _quieten()
    return OTLPMetricExporter(timeout=_timeout("METRICS"), insecure=_insecure("METRICS"))


def _timeout(signal: str) -> float:
    named = _variable(signal, "TIMEOUT")
    try:
        return float(named) if named else TIMEOUT_SECONDS
    except ValueError:
        logging.getLogger(__name__).warning("OTEL_EXPORTER_OTLP_TIMEOUT is no number: %r", named)
        return TIMEOUT_SECONDS


def _insecure(signal: str) -> bool | None:
    """True for an address without a scheme; None leaves it to the scheme and the variables."""
    return None if "://" in _variable(signal, "ENDPOINT") else True


def _variable(signal: str, name: str) -> str:
    """The signal's own variable, else the common one."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}", "")
    return own or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


class CountingExporter(SpanExporter):
    """Hands spans to ``inner`` and counts those that it took."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        return result

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See SpanExporter."""
        return self._inner.force_flush(timeout_millis)


class _OncePerMinute(logging.Filter):
    """Lets one line a minute through."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + QUIET_SECONDS
        return True


_quiet = _OncePerMinute()


def _quieten() -> None:
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _quiet not in logger.filters:
            logger.addFilter(_quiet)
