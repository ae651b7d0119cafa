"""Deadlines, retries, errors, ids and traces on the wire, against a real server on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from services.runtime import rpc, tracing
from services.runtime.errors import (
    Corrupt,
    Fenced,
    Internal,
    InvalidInput,
    NotReady,
    TimedOut,
    Unsupported,
)
from services.runtime.ids import bind_ids, current_ids
from services.runtime.methods import FALLBACK_SECONDS, MethodPolicy, method_policy
from services.runtime.ports import ReservedPort
from services.runtime.service import start_server
from services.runtime.settings import ServiceSettings

from .conftest import SERVICE, EchoApp, EchoStub  # noqa: TID252 (tests are no package)


async def echo(request: StringValue, context: Any) -> StringValue:
    return request


def failing(times: int, error: Exception) -> Any:
    left = [times]

    async def handler(request: StringValue, context: Any) -> StringValue:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return request

    return handler


async def served(app: EchoApp, settings: ServiceSettings) -> tuple[Any, EchoStub]:
    running = await start_server(app, settings)
    return running, rpc.stub(EchoStub, running.address, name="echo")


def test_policy_comes_from_the_contract() -> None:
    assert method_policy(f"/{SERVICE}/Say") == MethodPolicy(5.0, True)
    assert method_policy(f"/{SERVICE}/Slow") == MethodPolicy(1.0, False)
    assert method_policy("/nobody.Knows/This") == MethodPolicy(FALLBACK_SECONDS, False)


async def test_idempotent_call_is_retried(settings: ServiceSettings, text: Any) -> None:
    app = EchoApp(Say=failing(3, NotReady("not yet")))
    running, stub = await served(app, settings)
    assert (await stub.Say(text("hello"))).value == "hello"
    assert app.calls["Say"] == 4
    await running.stop()


async def test_other_calls_are_never_retried(settings: ServiceSettings, text: Any) -> None:
    app = EchoApp(Write=failing(1, NotReady("not yet")), Say=failing(1, Internal("broken")))
    running, stub = await served(app, settings)
    with pytest.raises(NotReady):
        await stub.Write(text("once"))
    with pytest.raises(Internal):
        await stub.Say(text("an error that no retry can mend"))
    assert (app.calls["Write"], app.calls["Say"]) == (1, 1)
    await running.stop()


async def test_retries_stop_at_the_deadline(settings: ServiceSettings, text: Any) -> None:
    running, stub = await served(EchoApp(Say=failing(10**6, NotReady("never"))), settings)
    began = time.monotonic()
    with pytest.raises(NotReady) as caught:
        await stub.Say(text("x"), timeout=0.8)
    assert time.monotonic() - began < 2.5
    assert int(caught.value.details["retries"]) >= 1
    await running.stop()


async def test_a_call_spans_a_restart_of_the_service(settings: ServiceSettings, text: Any) -> None:
    with ReservedPort.free() as port:
        handed = settings.model_copy(update={"listen": port.address, "port_handed_over": True})
        first, stub = await served(EchoApp(Say=echo), handed)
        await stub.Say(text("warm"))
        await first.stop()
        call = asyncio.create_task(stub.Say(text("patient"), timeout=20))
        await asyncio.sleep(1.5)
        assert not call.done()
        second = await start_server(EchoApp(Say=echo), handed)
        assert (await call).value == "patient"
        await second.stop()


async def test_error_comes_back_whole(settings: ServiceSettings, text: Any) -> None:
    sent = Fenced("Epoch 3 is over", where="ledger", do="Stop.", epoch="3")
    running, stub = await served(EchoApp(Write=failing(1, sent)), settings)
    with pytest.raises(Fenced) as caught:
        await stub.Write(text("x"))
    got = caught.value
    assert (got.message, got.where, got.do, got.reason) == (sent.message, sent.where, sent.do, "STALE_EPOCH")
    assert got.details == {"epoch": "3"}
    assert str(got) == "Epoch 3 is over (ledger). Stop."
    await running.stop()


async def test_huge_error_still_arrives(settings: ServiceSettings, text: Any) -> None:
    running, stub = await served(EchoApp(Write=failing(1, Corrupt("x" * 10**6, where="y" * 10**6))), settings)
    with pytest.raises(Corrupt, match="xxx"):
        await stub.Write(text("x"))
    await running.stop()


async def test_unknown_exception_becomes_internal(settings: ServiceSettings, text: Any) -> None:
    running, stub = await served(EchoApp(Write=failing(1, ZeroDivisionError("oops"))), settings)
    with pytest.raises(Internal, match="ZeroDivisionError: oops") as caught:
        await stub.Write(text("x"))
    assert caught.value.where == "echo, Write"
    with pytest.raises(Unsupported):
        await stub.Say(text("not registered"))
    await running.stop()


async def test_default_deadline_applies(settings: ServiceSettings, text: Any) -> None:
    seen: list[float] = []

    async def slow(request: StringValue, context: Any) -> StringValue:
        seen.append(context.time_remaining())
        await asyncio.sleep(30)
        return request

    running, stub = await served(EchoApp(Slow=slow), settings)
    began = time.monotonic()
    with pytest.raises(TimedOut):
        await stub.Slow(text("x"))
    assert 0.9 < time.monotonic() - began < 5.0
    with pytest.raises(TimedOut):
        await stub.Slow(text("x"), timeout=0.2)
    assert seen[1] < 0.3 < seen[0] < 1.1  # the wire rounds up
    await running.stop()


async def test_server_bounds_a_call_without_deadline(settings: ServiceSettings, text: Any) -> None:
    async def slow(request: StringValue, context: Any) -> StringValue:
        await asyncio.sleep(30)
        return request

    running, _ = await served(EchoApp(Slow=slow), settings)
    async with grpc.aio.insecure_channel(running.address) as plain:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EchoStub(plain).Slow(text("x"))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await running.stop()


async def test_stream_retries_only_before_its_first_message(settings: ServiceSettings, text: Any) -> None:
    attempts = [0]

    async def count(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        attempts[0] += 1
        if attempts[0] == 1:
            raise NotReady("not yet")
        yield StringValue(value="1")
        raise NotReady("in the middle")

    running, stub = await served(EchoApp(Count=count), settings)
    got: list[str] = []
    with pytest.raises(NotReady, match="in the middle"):  # noqa: PT012 (a loop has two lines)
        async for message in stub.Count(text("x")):
            got.append(message.value)  # noqa: PERF401 (what came before the error counts)
    assert (got, attempts[0]) == (["1"], 2)
    await running.stop()


async def test_request_streams(settings: ServiceSettings, text: Any) -> None:
    async def join(requests: Any, context: Any) -> StringValue:
        return StringValue(value="".join([request.value async for request in requests]))

    async def chat(requests: Any, context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield StringValue(value=request.value.upper())
        raise InvalidInput("enough")

    async def parts() -> AsyncIterator[StringValue]:
        for letter in "abc":
            yield text(letter)

    running, stub = await served(EchoApp(Join=join, Chat=chat), settings)
    assert (await stub.Join(parts())).value == "abc"
    got: list[str] = []
    with pytest.raises(InvalidInput, match="enough"):  # noqa: PT012
        async for message in stub.Chat(parts()):
            got.append(message.value)  # noqa: PERF401
    assert got == ["A", "B", "C"]
    await running.stop()


async def test_breaking_out_of_a_stream_ends_it_on_the_server(settings: ServiceSettings, text: Any) -> None:
    ended = asyncio.Event()

    async def count(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            while True:
                yield request
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    running, stub = await served(EchoApp(Count=count), settings)
    async with stub.Count(text("x")) as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(ended.wait(), 3)
    await running.stop()


async def test_ids_and_trace_travel(settings: ServiceSettings, text: Any) -> None:
    seen: list[tuple[dict[str, str], str]] = []

    async def say(request: StringValue, context: Any) -> StringValue:
        seen.append((dict(current_ids()), tracing.current_traceparent()))
        return request

    running, stub = await served(EchoApp(Say=say), settings)
    with bind_ids(run="r1", group="g1", sample=0), tracing.span("outer"):
        mine = tracing.current_traceparent()
        await stub.Say(text("x"))
    await stub.Say(text("x"))
    ids, theirs = seen[0]
    assert ids == {"run": "r1", "group": "g1", "sample": "0"}
    assert theirs.split("-")[1] == mine.split("-")[1]
    assert theirs.split("-")[2] != mine.split("-")[2]
    assert seen[1] == ({}, "")
    await running.stop()


async def test_message_above_four_megabytes(settings: ServiceSettings, text: Any) -> None:
    running, stub = await served(EchoApp(Say=echo), settings)
    assert len((await stub.Say(text("x" * 20_000_000))).value) == 20_000_000
    await running.stop()
