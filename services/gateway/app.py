"""The gateway as an ASGI application."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from services.gateway import problems
from services.gateway.access import Access
from services.gateway.peers import Peers
from services.gateway.routes import buffer, engines, events, health, runs, trajectories
from services.gateway.settings import GatewaySettings
from services.gateway.streams import Streams
from services.runtime import auth, rpc

PREFIX = "/api/v1"


def create_app(settings: GatewaySettings) -> FastAPI:
    """The application; its connections belong to the loop that runs its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.peers = Peers(settings)
        app.state.streams = Streams(settings.max_streams, settings.ping_seconds)
        yield
        await rpc.close_channels()

    app = FastAPI(
        title="Headrace",
        version=importlib.metadata.version("headrace"),
        description="Runs, trajectories, engines and health of a Headrace stack.",
        openapi_url=f"{PREFIX}/openapi.json",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        generate_unique_id_function=_operation,
    )
    for module in (runs, events, trajectories, engines, buffer, health):
        app.include_router(module.router, prefix=PREFIX, responses=problems.DOCUMENTED)
    app.include_router(health.probes)
    problems.install(app)
    _surround(app, settings)
    return app


def _surround(app: FastAPI, settings: GatewaySettings) -> None:
    token = auth.token()
    app.add_middleware(Access, token=token, max_body_bytes=settings.max_body_bytes)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins:
        # Outside of the token's check: a browser asks for leave without it.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "Last-Event-ID"],
        )  # fmt: skip
    plain = app.openapi
    app.openapi = lambda: _described(plain(), secured=token is not None)  # type: ignore[method-assign]


def _described(schema: dict[str, Any], *, secured: bool) -> dict[str, Any]:
    """``schema`` with what FastAPI cannot know: the form of a problem, and the token."""
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = problems.Problem.model_json_schema()
    if secured:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
    return schema


def _operation(route: APIRoute) -> str:
    return route.name
