"""The stack's token: where it comes from, who must send it, and where it must never appear."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime import auth, rpc
from services.runtime.errors import InvalidInput, Unauthenticated
from services.runtime.service import start_server
from services.runtime.settings import ServiceSettings

from .conftest import SERVICE, EchoApp, EchoStub  # noqa: TID252 (tests are no package)
from .test_service import start, wait_for  # noqa: TID252

SECRET = "0123456789abcdef-secret"
OTHER = "another-token-of-the-same-kind"


async def echo(request: StringValue, context: Any) -> StringValue:
    return request


async def join(requests: Any, context: Any) -> StringValue:
    return StringValue(value="".join([request.value async for request in requests]))


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    return SECRET


def test_the_file_wins_and_its_end_of_line_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert auth.token() is None
    assert auth.call_headers() == ()
    file = tmp_path / "token"
    file.write_text(OTHER + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    assert auth.header_value() == f"Bearer {SECRET}"
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(file))
    assert auth.header_value() == f"Bearer {OTHER}"
    assert auth.doubts() == []
    file.chmod(0o644)
    assert "chmod 600" in auth.doubts()[0]
    assert OTHER not in repr(auth.token())


@pytest.mark.parametrize(
    "value", ["short", "with a space in the middle", "tab\tulated-and-long-enough", "ü" * 20]
)
def test_a_token_that_cannot_be_used_names_its_key(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", value)
    with pytest.raises(InvalidInput, match="HEADRACE_TOKEN") as caught:
        ServiceSettings.load()
    assert value not in str(caught.value)


def test_a_file_that_is_missing_or_open_to_writers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(file))
    with pytest.raises(InvalidInput, match=r"No such file.*HEADRACE_TOKEN_FILE"):
        ServiceSettings.load()
    file.write_text(SECRET)
    file.chmod(0o606)
    with pytest.raises(InvalidInput, match="may write"):
        ServiceSettings.load()


async def test_every_shape_of_call_carries_the_token(
    settings: ServiceSettings, secured: str, text: Any
) -> None:
    async def count(request: StringValue, context: Any) -> Any:
        yield request

    async def chat(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request

    async def parts() -> Any:
        yield text("x")

    running = await start_server(EchoApp(Say=echo, Join=join, Count=count, Chat=chat), settings)
    stub = rpc.stub(EchoStub, running.address, name="echo")
    assert (await stub.Say(text("x"))).value == "x"
    assert (await stub.Join(parts())).value == "x"
    assert [answer.value async for answer in stub.Count(text("x"))] == ["x"]
    assert [answer.value async for answer in stub.Chat(parts())] == ["x"]
    await running.stop()


@pytest.mark.parametrize(
    "sent", ["", f"Bearer {OTHER}", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", "Bearer "]
)
async def test_without_the_token_nothing_is_told(
    sent: str, settings: ServiceSettings, secured: str, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = EchoApp(Say=echo, Join=join)
    running = await start_server(app, settings)
    metadata = (("authorization", sent),) if sent else ()

    async def parts() -> Any:
        yield text("x")

    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = EchoStub(channel)
        nobody = channel.unary_unary("/headrace.test.Nobody/Knows", text("x").SerializeToString)
        for call in (
            stub.Say(text("x"), metadata=metadata, timeout=5),
            stub.Join(parts(), metadata=metadata, timeout=5),
            nobody(text("x"), metadata=metadata, timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not re.search("secret|another", str(caught.value))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflection.ServerReflectionInfo(asked, metadata=metadata, timeout=5).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=5
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert app.calls["Say"] == app.calls["Join"] == 0
    assert SECRET not in caplog.text
    await running.stop()


async def test_a_wrong_token_is_one_error_of_the_tree_and_is_not_tried_again(
    settings: ServiceSettings, secured: str, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = EchoApp(Say=echo)
    running = await start_server(app, settings)
    monkeypatch.setenv("HEADRACE_TOKEN", OTHER)
    with pytest.raises(Unauthenticated, match=r"wrong token \(echo\)\. Set HEADRACE_TOKEN") as caught:
        await rpc.stub(EchoStub, running.address, name="echo").Say(text("x"))
    assert "retries" not in caught.value.details
    await running.stop()


def test_a_served_token_is_not_in_the_process_list_nor_in_the_log(tmp_path: Path) -> None:
    process = start(tmp_path, HEADRACE_TOKEN=SECRET, HEADRACE_SERVICE_LISTEN="0.0.0.0:0")
    wait_for(tmp_path / "ready")
    shown = subprocess.run(["ps", "-o", "args=", "-p", str(process.pid)], capture_output=True, text=True)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert SECRET not in shown.stdout + err
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


def test_children_for_other_peoples_code_do_not_get_it(secured: str) -> None:
    assert "HEADRACE_TOKEN" in os.environ
    assert not {"HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"} & set(auth.environment_without())
