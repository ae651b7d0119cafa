"""What host and worker say to each other: JSON lines over two pipes.

Host to worker (its stdin): one ``Assignment``, ever; a worker serves one run in its life.
Worker to host: ``warm`` (imports are done), ``ready`` and later ``info`` (an EngineInfo), ``failed`` (an
error, after which the worker ends).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf import json_format

from protos.headrace.v1 import rollout_pb2
from services.runtime.errors import HeadraceError, Internal, InvalidInput, NotReady, Unsupported

EVENTS_FD = "HEADRACE_WORKER_EVENTS_FD"
ENGINE_ID = "HEADRACE_WORKER_ENGINE_ID"

_ERRORS: dict[str, type[HeadraceError]] = {
    cls.__name__: cls for cls in (InvalidInput, Unsupported, NotReady, Internal)
}


@dataclass(frozen=True, slots=True)
class Assignment:
    """The run that a worker is to serve."""

    run: str
    policy_json: str
    seed: int

    @classmethod
    def of(cls, request: rollout_pb2.EngineSetupRequest) -> Assignment:
        """The assignment of a Setup call."""
        if not request.run:
            raise InvalidInput("Setup names no run", where="run")
        return cls(request.run, request.policy_json, request.seed)

    def line(self) -> bytes:
        """One JSON line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Assignment:
        """The assignment of one line."""
        return cls(**json.loads(line))


class Events:
    """The worker's end of the pipe to its host."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: str, **fields: Any) -> None:
        """Write one event to the host."""
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def info(self, event: str, info: rollout_pb2.EngineInfo) -> None:
        """Send ``info`` as ``event``."""
        self.send(event, info=json_format.MessageToDict(info))

    def failed(self, error: HeadraceError) -> None:
        """Send the error that ended the setup."""
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS), "Internal")
        fields = {"message": error.message, "where": error.where, "do": error.do, "reason": error.reason}
        self.send("failed", error=name, **fields)


def info_of(event: dict[str, Any]) -> rollout_pb2.EngineInfo:
    """The EngineInfo of a ``ready`` or ``info`` event."""
    return json_format.ParseDict(event["info"], rollout_pb2.EngineInfo())


def error_of(event: dict[str, Any]) -> HeadraceError:
    """The error of a ``failed`` event."""
    cls = _ERRORS[event["error"]]
    return cls(event["message"], where=event["where"], do=event["do"], reason=event["reason"])
