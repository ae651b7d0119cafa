"""A collector of OTLP over gRPC, as a process of its own: ``live`` counts what it gets, ``silent`` takes
calls and answers none.

Invariants: it prints its port as soon as it listens; when its standard input ends it prints what it got, as
JSON, and leaves. It keeps nothing of what it gets but counts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from typing import Any, Self

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.runtime.errors import Internal

START_SECONDS = 30.0
FOREVER = 86_400.0


class Sink:
    """The process, seen from the benchmark; ``received`` is complete after the block."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.address = ""
        self.received: dict[str, Any] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.telemetry_parts.sink", self._mode]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise Internal("The collector did not start", where=self._mode, do="See its messages.")
        self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            out, _err = self._process.communicate("", timeout=START_SECONDS)
            self.received = json.loads(out)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Collector:
    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self.counts: Counter[str] = Counter()
        self.services: set[str] = set()

    async def traces(self, request: trace_service_pb2.ExportTraceServiceRequest, _: Any) -> Any:
        self.counts["trace calls"] += 1
        await self._hang()
        for each in request.resource_spans:
            self._named(each.resource)
            self.counts["spans"] += sum(len(scope.spans) for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    async def metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest, _: Any) -> Any:
        self.counts["metric calls"] += 1
        await self._hang()
        for each in request.resource_metrics:
            self._named(each.resource)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    async def _hang(self) -> None:
        if self._silent:
            await asyncio.sleep(FOREVER)

    def _named(self, resource: Any) -> None:
        self.services.update(a.value.string_value for a in resource.attributes if a.key == "service.name")


async def _serve(mode: str) -> None:
    collector = _Collector(mode == "silent")
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    traces, metrics = (
        trace_service_pb2_grpc.TraceServiceServicer(),
        metrics_service_pb2_grpc.MetricsServiceServicer(),
    )
    traces.Export, metrics.Export = collector.traces, collector.metrics  # type: ignore[method-assign]
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.2)
    print(json.dumps({**collector.counts, "services": sorted(collector.services)}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
