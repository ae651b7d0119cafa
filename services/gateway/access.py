"""Who may call, and how much a request may weigh: decided before a byte of it is read.

Invariants: everything but the two probes needs the stack's token where there is one; a body never grows
beyond its limit in memory, declared or not.
"""

from __future__ import annotations

from prometheus_client import Counter
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.problems import of_error, problem
from services.runtime import auth
from services.runtime.errors import Unauthenticated

PROBES = ("/healthz", "/readyz")
REQUESTS = Counter("headrace_gateway_requests", "Requests by method and status.", ["method", "status"])
METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS"))


class Access:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, token: SecretStr | None, max_body_bytes: int) -> None:
        self._app = app
        self._token = token
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._checked(scope, receive, _counting(scope, send))

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in PROBES:
            try:
                auth.check(self._token, headers.get(auth.HEADER), where="gateway")
            except Unauthenticated as exc:
                await of_error(exc)(scope, receive, send)
                return
        declared = headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > self._limit:
            await self._too_large(scope, receive, send)
            return
        await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise _TooLargeError
            return message

        try:
            await self._app(scope, counted, send)
        except _TooLargeError:
            await self._too_large(scope, receive, send)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = f"The request is larger than {self._limit} bytes"
        await problem(413, text, "TOO_LARGE", where="gateway")(scope, receive, send)


def _counting(scope: Scope, send: Send) -> Send:
    method = scope["method"] if scope["method"] in METHODS else "other"

    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            REQUESTS.labels(method, str(message["status"])).inc()
        await send(message)

    return counted


class _TooLargeError(BaseException):
    """Not an Exception: nothing between here and the middleware may turn it into something else."""
