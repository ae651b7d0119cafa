"""Every metric of Headrace, and where metrics go.

Invariants
- Instruments are made once, here, and cost nothing while nobody reads them (see :func:`setup`).
- Recording never blocks and never raises. What cannot be exported is dropped by the exporter's own thread.
- Two readers at most: OTLP while ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set, and the scrape endpoint where the
  service has a ``METRICS_LISTEN``. Both see the same instruments.
- No thread exists before :func:`setup`: a process that forks calls it afterwards.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

from services.runtime import otlp, tracing
from services.runtime.metrics_server import MetricsServer
from services.runtime.resource import resource

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
EXPORT_EVERY_MS = 5000
EXPORT_TIMEOUT_MS = 2000
SHUTDOWN_SECONDS = 1.0

_meter = metrics.get_meter("headrace")


def _seconds(name: str, text: str) -> metrics.Histogram:
    return _meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_SECONDS)


def _count(name: str, text: str, unit: str = "1") -> metrics.Counter:
    return _meter.create_counter(name, unit, text)


def _gauge(name: str, text: str, unit: str = "1") -> Any:
    return _meter.create_gauge(name, unit, text)


rpc_seconds = _seconds("headrace.rpc.server.duration", "calls answered, by method and code")
run_step = _gauge("headrace.run.step", "completed train steps, by run")
run_metric = _gauge("headrace.run.metric", "metrics of the newest step, by run and name")
run_phase = _count("headrace.run.phase.time", "time of the step loop, by run and phase", "s")
buffer_groups = _gauge("headrace.buffer.groups", "groups of the train book, by run and state")
buffer_samples = _gauge("headrace.buffer.samples", "samples of the train book, by run and state")
buffer_dropped = _gauge("headrace.buffer.dropped", "groups dropped so far, by run and reason")
buffer_redeliveries = _gauge("headrace.buffer.redeliveries", "samples handed out again so far, by run")
buffer_duplicates = _gauge("headrace.buffer.duplicates", "trajectories that came twice so far, by run")
buffer_appended = _count("headrace.buffer.appended", "trajectories handed in, by status")
gym_samples = _count("headrace.gym.samples", "samples that ended, by outcome")
gym_in_flight = _meter.create_up_down_counter("headrace.gym.in_flight", "1", "samples being worked on")
gym_stage = _seconds("headrace.gym.stage.duration", "time of one sample, by stage")
reward_seconds = _seconds("headrace.reward.duration", "time of one score, by verifier and result")
rollout_turns = _count("headrace.rollout.turns", "turns answered, by engine")
rollout_tokens = _count("headrace.rollout.tokens", "tokens sampled, by engine")
rollout_repeats = _count("headrace.rollout.repeats", "turns sent again because their engine failed")
rollout_in_flight = _gauge("headrace.rollout.in_flight", "turns at engines")
rollout_waiting = _gauge("headrace.rollout.waiting", "turns that wait for an engine")
engine_seconds = _seconds("headrace.engine.turn.duration", "sampling of one turn inside the engine")
engine_cached = _count("headrace.engine.cached_tokens", "prompt tokens found in the prefix cache")
refit_seconds = _seconds("headrace.refit.duration", "one publish, by phase")
refit_bytes = _count("headrace.refit.transferred", "bytes of weights published", "By")
refit_version = _gauge("headrace.refit.version", "number of the committed version")
refit_engines = _gauge("headrace.refit.engines", "engines, by state")
trainer_seconds = _seconds("headrace.trainer.step.duration", "one train step, by phase")


def _lost_spans(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
    for destination in tracing.DESTINATIONS:
        yield metrics.Observation(tracing.dropped_spans(destination), {"destination": destination})


_meter.create_observable_gauge(
    "headrace.telemetry.spans_dropped", [_lost_spans], "1", "spans not (yet) written, by destination"
)

_lock = threading.Lock()
_server: MetricsServer | None = None
_provider: MeterProvider | None = None
_ended = False


def setup(service: str, listen: str = "") -> None:
    """Send this process's metrics to where the environment and ``listen`` (HOST:PORT or empty) say.

    Once in a process's life; raises InvalidInput when the port is taken.
    """
    global _server, _provider
    with _lock:
        if _provider is not None:
            return
        readers: list[MetricReader] = []
        exporter = otlp.metric_exporter()
        if exporter is not None:
            readers.append(
                PeriodicExportingMetricReader(
                    exporter,
                    export_interval_millis=EXPORT_EVERY_MS,
                    export_timeout_millis=EXPORT_TIMEOUT_MS,
                )
            )
        if listen:
            _server = MetricsServer(service, listen)
            readers.append(_server.reader)
        if not readers:
            return
        _provider = MeterProvider(readers, resource=resource(service), shutdown_on_exit=False)
        metrics.set_meter_provider(_provider)
        atexit.register(shutdown)


def address() -> str:
    """Where the scrape endpoint listens; empty without one."""
    return "" if _server is None else _server.address


def shutdown(timeout: float = SHUTDOWN_SECONDS) -> None:
    """Send what is left, bounded; the end of the process. A second call does nothing."""
    global _ended
    with _lock:
        ended, _ended = _ended, True
    if ended or _provider is None:
        return
    if _server is not None:
        _server.close()
    # The exporter may be waiting for a collector that does not answer: it is not waited for.
    thread = threading.Thread(
        target=_provider.shutdown, kwargs={"timeout_millis": timeout * 1000}, daemon=True
    )
    try:
        thread.start()
    except RuntimeError:
        return  # The interpreter ends: no thread can be started any more.
    thread.join(timeout)


def record_all(instrument: Any, values: Mapping[str, float], attribute: str, **attributes: str) -> None:
    """Set (or record, or add) each value under its name as ``attribute``."""
    act = getattr(instrument, "set", None) or getattr(instrument, "record", None) or instrument.add
    for name, value in values.items():
        act(value, {**attributes, attribute: name})
