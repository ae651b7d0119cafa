"""Probes for whoever keeps the gateway running, and the health of every service behind it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from services.gateway.peers import CONTRACT
from services.gateway.problems import DOCUMENTED
from services.gateway.requests import ThePeers
from services.runtime import rpc
from services.runtime.errors import HeadraceError, NotReady

probes = APIRouter(tags=["health"])
router = APIRouter(tags=["health"])
CHECK_SECONDS = 2.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


class Alive(BaseModel):
    """The process answers."""

    status: str = "ok"


class ServiceHealth(BaseModel):
    """One service at one address."""

    service: str
    address: str
    live: bool
    ready: bool
    error: str = Field(description="Why it does not answer.")


class Overview(BaseModel):
    """Every service behind the gateway."""

    ready: bool = Field(description="Whether all of them are.")
    services: list[ServiceHealth]


@probes.get("/healthz")
async def healthz() -> Alive:
    """The gateway lives."""
    return Alive()


@probes.get("/readyz", responses={503: DOCUMENTED[503]})
async def readyz(peers: ThePeers) -> Alive:
    """The gateway's controller answers; 503 while it does not."""
    found = await _checked("controller", peers.addresses["controller"])
    if not found.ready:
        raise NotReady("The controller does not answer", where=found.address, do="Try again shortly.")
    return Alive()


@probes.get("/metrics", response_class=Response)
async def scrape() -> Response:
    """The gateway's own metrics, as Prometheus scrapes them."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/health")
async def overview(peers: ThePeers) -> Overview:
    """Whether each service lives and is ready; several addresses are asked each."""
    asked = [
        _checked(name, address.strip())
        for name, addresses in peers.addresses.items()
        for address in addresses.split(",")
    ]
    found = await asyncio.gather(*asked)
    return Overview(ready=all(one.ready for one in found), services=list(found))


async def _checked(name: str, address: str) -> ServiceHealth:
    stub: health_pb2_grpc.HealthAsyncStub = rpc.stub(health_pb2_grpc.HealthStub, address, name=name)
    try:
        # The ready answer first: a service that is ready lives.
        ready = await _serves(stub, f"headrace.v1.{CONTRACT[name]}")
        live = ready or await _serves(stub, "")
    except HeadraceError as exc:
        return ServiceHealth(service=name, address=address, live=False, ready=False, error=exc.message)
    return ServiceHealth(service=name, address=address, live=live, ready=ready, error="")


async def _serves(stub: health_pb2_grpc.HealthAsyncStub, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    return bool((await stub.Check(request, timeout=CHECK_SECONDS)).status == _SERVING)
