"""``headrace health ADDRESS``: what a container's healthcheck calls. Health answers without a token."""

from __future__ import annotations

import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.failures import FAILED
from services.cli.output import say
from services.runtime.errors import InvalidInput
from services.runtime.settings import split_address


def health_command(address: str, service: str, timeout: float) -> int:
    """0 when ``service`` (or the process) at ``address`` serves, else 1 with the reason."""
    problem = _http(address, timeout) if "://" in address else _grpc(address, service, timeout)
    if problem:
        say(f"{address}: {problem}")
    return FAILED if problem else 0


def _grpc(address: str, service: str, timeout: float) -> str:
    try:
        split_address(address)
    except ValueError as exc:
        raise InvalidInput(str(exc)) from exc
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as exc:
            return str(exc.code().name)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _http(address: str, timeout: float) -> str:
    if not address.startswith(("http://", "https://")):
        raise InvalidInput(f"{address} is neither HOST:PORT nor an HTTP address")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=timeout) as answer:
            return "" if answer.status == 200 else str(answer.status)
    except urllib.error.URLError as exc:
        return str(exc.reason)
    except OSError as exc:
        return str(exc)
