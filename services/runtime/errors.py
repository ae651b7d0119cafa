"""One error tree for every service, mapped to gRPC status codes and back.

Invariants
- Every error says *what* happened, *where*, and *what to do*; ``str()`` is ``what (where). do``.
- An error that crosses a gRPC hop comes back as the same class, with the same fields.
- What travels is bounded (``MAX_TEXT`` per field), so that an error never exceeds the metadata limit.
"""

# ruff: noqa: N818 (the names say what happened; "Error" would only repeat the base)
from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import grpc

DOMAIN = "headrace"
DETAILS_KEY = "grpc-status-details-bin"
MAX_TEXT = 2000
_CLASS_KEY = "error"

_TREE: dict[str, type[HeadraceError]] = {}


class HeadraceError(Exception):
    """Root of the tree.

    ``where`` names the place (file, field, service), ``do`` the remedy, ``reason`` overrides the class's
    UPPER_SNAKE reason, and further keywords become string details that travel with the status.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self, message: str, *, where: str = "", do: str = "", reason: str | None = None, **details: str
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.do = do
        if reason is not None:
            self.reason = reason
        self.details: dict[str, str] = {key: str(value) for key, value in details.items()}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _TREE[cls.__name__] = cls

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text = f"{text.rstrip('.')} ({self.where})"
        return f"{text.rstrip('.')}. {self.do}" if self.do else text


class InvalidInput(HeadraceError):
    """The caller's input is wrong; trying again cannot help. Processes exit with status 2 on it."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_INPUT"


class NotFound(HeadraceError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class Conflict(HeadraceError):
    """The thing exists already, with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "CONFLICT"


class Fenced(HeadraceError):
    """A newer owner (epoch, attempt) has taken over; the caller must stop."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class NotReady(HeadraceError):
    """The service cannot answer now but may soon; idempotent calls are retried on it."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class Exhausted(HeadraceError):
    """A bounded resource (memory, queue, budget) is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "EXHAUSTED"


class TimedOut(HeadraceError):
    """A deadline passed; whether the work took effect is unknown."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "TIMED_OUT"


class Cancelled(HeadraceError):
    """Someone asked for the work to end."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class Unauthenticated(HeadraceError):
    """The caller did not prove who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class Refused(HeadraceError):
    """The state of the system forbids the operation; change the state first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "REFUSED"


class Corrupt(HeadraceError):
    """Data does not match its own description (length, digest, schema)."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "CORRUPT"


class Internal(HeadraceError):
    """A fault of Headrace itself."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


class Unsupported(HeadraceError):
    """The operation does not exist here."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


_BY_CODE: dict[grpc.StatusCode, type[HeadraceError]] = {
    cls.code: cls
    for cls in (
        InvalidInput, NotFound, Conflict, Refused, NotReady, Exhausted, TimedOut, Cancelled,
        Unauthenticated, Corrupt, Internal, Unsupported,
    )
}  # fmt: skip
_BY_CODE[grpc.StatusCode.OUT_OF_RANGE] = InvalidInput
_BY_CODE[grpc.StatusCode.ABORTED] = Refused
_BY_CODE[grpc.StatusCode.PERMISSION_DENIED] = Unauthenticated


class WireStatus(NamedTuple):
    """What ``context.abort`` needs; also a ``grpc.Status`` by shape."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def to_status(exc: HeadraceError) -> WireStatus:
    """The gRPC status of ``exc``: its text, and a ``google.rpc.ErrorInfo`` with where, do and details."""
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
    from grpc_status import rpc_status

    fields = {_CLASS_KEY: type(exc).__name__, "message": exc.message, "where": exc.where, "do": exc.do}
    info = error_details_pb2.ErrorInfo(reason=exc.reason, domain=DOMAIN)
    for key, value in {**exc.details, **fields}.items():
        if value:
            info.metadata[key] = _bounded(value)
    packed = any_pb2.Any()
    packed.Pack(info)
    message = _bounded(str(exc))
    proto = status_pb2.Status(code=exc.code.value[0], message=message, details=[packed])
    status = rpc_status.to_status(proto)
    return WireStatus(exc.code, message, tuple(status.trailing_metadata))


def from_rpc_error(exc: grpc.aio.AioRpcError, *, where: str = "") -> HeadraceError:
    """The tree's error for a failed call: the server's own class when it sent one, else by status code."""
    info = _error_info(exc)
    message = exc.details() or exc.code().name
    if info is None:
        cls = _BY_CODE.get(exc.code(), Internal)
        return cls(message, where=where, reason=None, grpc_code=exc.code().name)
    fields = dict(info.metadata)
    cls = _TREE.get(fields.pop(_CLASS_KEY, ""), _BY_CODE.get(exc.code(), Internal))
    message = fields.pop("message", message)
    error = cls(message, where=fields.pop("where", where), do=fields.pop("do", ""), reason=info.reason)
    error.details = fields
    return error


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _error_info(exc: grpc.aio.AioRpcError) -> Any:
    from google.rpc import error_details_pb2, status_pb2

    metadata: Any = exc.trailing_metadata() or ()
    for key, value in metadata:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None
