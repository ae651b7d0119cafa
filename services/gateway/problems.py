"""Errors as ``application/problem+json`` (RFC 9457), from the one error tree.

Invariants: every failure has this form, whatever raised it; our own messages are passed on,
tracebacks never.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from services.recipe import RecipeError
from services.runtime import errors
from services.runtime.logs import get_logger

MEDIA_TYPE = "application/problem+json"
_STATUS: dict[type[errors.HeadraceError], int] = {
    errors.InvalidInput: 422, errors.NotFound: 404, errors.Conflict: 409, errors.Fenced: 409,
    errors.Refused: 409, errors.NotReady: 503, errors.Exhausted: 429, errors.TimedOut: 504,
    errors.Cancelled: 503, errors.Unauthenticated: 401, errors.Unsupported: 501,
}  # fmt: skip
RETRY_AFTER = {"Retry-After": "1"}
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="headrace"'}


class Problem(BaseModel):
    """What went wrong, where, and what to do."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    reason: str = Field(description="UPPER_SNAKE, stable: for programs.")
    where: str = ""
    do: str = ""
    details: dict[str, str] = Field(default_factory=dict)


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status in (401, 404, 409, 413, 422, 429, 501, 502, 503, 504)
}


def problem(status: int, detail: str, reason: str, **fields: Any) -> JSONResponse:
    """A response for one failure."""
    body = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=detail, reason=reason, **fields
    ).model_dump()
    headers = {401: CHALLENGE, 429: RETRY_AFTER, 503: RETRY_AFTER}.get(status)
    return JSONResponse(body, status, headers=headers, media_type=MEDIA_TYPE)


def of_error(exc: errors.HeadraceError) -> JSONResponse:
    """The response for an error of the tree."""
    status = next((_STATUS[cls] for cls in type(exc).__mro__ if cls in _STATUS), 500)
    return problem(status, exc.message, exc.reason, where=exc.where, do=exc.do, details={**exc.details})


def install(app: FastAPI) -> None:
    """Give ``app`` a handler for everything that can be raised."""
    app.add_exception_handler(errors.HeadraceError, _known)
    app.add_exception_handler(RecipeError, _recipe)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unknown)


async def _known(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, errors.HeadraceError), "registered for it"
    if isinstance(exc, errors.Unauthenticated):
        # The client's own token was right: a service behind refuses ours.
        return problem(502, "A service refuses the gateway's token", "PEER_UNAUTHENTICATED", where=exc.where)
    return of_error(exc)


async def _recipe(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RecipeError), "registered for it"
    return problem(422, exc.message, "INVALID_RECIPE", where=exc.where, do=exc.do)


async def _invalid(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError), "registered for it"
    first = exc.errors()[0]
    return problem(
        422, str(first["msg"]), "INVALID_INPUT", where=".".join(str(part) for part in first["loc"])
    )


async def _http(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException), "registered for it"
    return problem(exc.status_code, str(exc.detail), HTTPStatus(exc.status_code).name, where=request.url.path)


async def _unknown(request: Request, exc: Exception) -> JSONResponse:
    get_logger("gateway").error("handler failed", path=request.url.path, exc_info=exc)
    return problem(500, type(exc).__name__, "INTERNAL", do="See the log of the gateway.")
