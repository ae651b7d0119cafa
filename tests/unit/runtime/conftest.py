"""A small contract made at run time, so that the tests do not depend on the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import StringValue

from protos.headrace.v1 import options_pb2
from services.runtime import rpc
from services.runtime.service import ServiceApp
from services.runtime.settings import ServiceSettings

SERVICE = "headrace.test.Echo"
IDEMPOTENT = descriptor_pb2.MethodOptions.IDEMPOTENT
METHODS = {  # name: (deadline, idempotent, request stream, response stream)
    "Say": (5, True, False, False),
    "Write": (5, False, False, False),
    "Slow": (1, False, False, False),
    "Count": (5, True, False, True),
    "Join": (5, True, True, False),
    "Chat": (5, False, True, True),
}


def _define() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="headrace_test_echo.proto", package="headrace.test")
    file.dependency.extend(["google/protobuf/wrappers.proto", options_pb2.DESCRIPTOR.name])
    service = file.service.add(name="Echo")
    for name, (deadline, idempotent, asks, answers) in METHODS.items():
        method = service.method.add(name=name, client_streaming=asks, server_streaming=answers)
        method.input_type = method.output_type = ".google.protobuf.StringValue"
        method.options.Extensions[options_pb2.deadline_seconds] = deadline
        if idempotent:
            method.options.idempotency_level = IDEMPOTENT
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


_define()


class EchoStub:
    """What protoc would generate."""

    def __init__(self, channel: Any) -> None:
        for name, (_, _, asks, answers) in METHODS.items():
            shape = f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}"
            call = getattr(channel, shape)(
                f"/{SERVICE}/{name}",
                request_serializer=StringValue.SerializeToString,
                response_deserializer=StringValue.FromString,
                _registered_method=True,
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:  # for the type checker
        raise AttributeError(name)


class EchoApp(ServiceApp):
    """Handlers are given by the test; each counts its calls."""

    name = "echo"

    def __init__(self, **handlers: Callable[..., Any]) -> None:
        self.calls: dict[str, int] = dict.fromkeys(METHODS, 0)
        self.handlers = handlers
        self.ready = True
        self.stopped = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        made = {name: self._handler(name) for name in METHODS if name in self.handlers}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, made),))
        return [SERVICE]

    def readiness(self) -> tuple[bool, str]:
        return self.ready, "told so"

    async def stop(self) -> None:
        self.stopped.set()

    def _handler(self, name: str) -> Any:
        _, _, asks, answers = METHODS[name]
        factory = getattr(
            grpc, f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}_rpc_method_handler"
        )

        async def unary(request: Any, context: Any) -> Any:
            self.calls[name] += 1
            return await self.handlers[name](request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self.calls[name] += 1
            async for message in self.handlers[name](request, context):
                yield message

        return factory(
            stream if answers else unary,
            request_deserializer=StringValue.FromString,
            response_serializer=StringValue.SerializeToString,
        )


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(home=tmp_path)


@pytest.fixture(autouse=True)
async def closed_channels() -> AsyncIterator[None]:
    yield
    await rpc.close_channels()


@pytest.fixture
def text() -> Callable[[str], StringValue]:
    return lambda value: StringValue(value=value)
