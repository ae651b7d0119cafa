"""Addresses that mean several replicas: round, past the dead, back to those that return, and never twice."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from services.runtime import rpc
from services.runtime.errors import InvalidInput, NotReady
from services.runtime.ports import ReservedPort
from services.runtime.service import start_server
from services.runtime.settings import ServiceSettings
from services.runtime.targets import targets

from .conftest import EchoApp, EchoStub  # noqa: TID252 (tests are no package)

NAMES = ("a", "b", "c")


class Replicas:
    """Servers at held ports that answer with their own name."""

    def __init__(self, settings: ServiceSettings, hosts: tuple[str, ...] = ("127.0.0.1",) * 3) -> None:
        self._settings = settings
        self.ports = {name: ReservedPort.free(host) for name, host in zip(NAMES, hosts, strict=True)}
        self.running: dict[str, Any] = {}
        self.apps: dict[str, EchoApp] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            self.apps[name] = EchoApp(Say=_says(name), Write=_says(name), Count=_counts(name))
            update = {"listen": self.ports[name].address, "port_handed_over": True}
            self.running[name] = await start_server(self.apps[name], self._settings.model_copy(update=update))

    async def stop(self, name: str) -> None:
        await self.running.pop(name).stop(0)

    async def close(self) -> None:
        for name in list(self.running):
            await self.stop(name)
        for port in self.ports.values():
            port.close()


def _says(name: str) -> Any:
    async def say(request: StringValue, context: Any) -> StringValue:
        return StringValue(value=name)

    return say


def _counts(name: str) -> Any:
    async def count(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        for _ in range(20):
            yield StringValue(value=name)
            await asyncio.sleep(0.01)

    return count


@pytest.fixture
async def replicas(settings: ServiceSettings) -> AsyncIterator[Replicas]:
    made = Replicas(settings)
    yield made
    await made.close()


async def answered(call: Any, text: Any, times: int = 12) -> Counter[str]:
    return Counter([(await call(text("x"), timeout=10)).value for _ in range(times)])


async def until(call: Any, text: Any, wanted: set[str]) -> None:
    async with asyncio.timeout(10):
        while set(await answered(call, text, 6)) != wanted:
            await asyncio.sleep(0.05)


def addresses(replicas: Replicas, kind: str) -> str:
    """The replicas as literal addresses, or as names beside them."""
    ports = [port.port for port in replicas.ports.values()]
    if kind == "literal":
        return ", ".join(f"127.0.0.1:{port}" for port in ports)
    return f"127.0.0.1:{ports[0]},localhost:{ports[1]},localhost:{ports[2]}"


def test_what_an_address_means() -> None:
    assert [target.name for target in targets("127.0.0.1:7001")] == ["127.0.0.1:7001"]
    assert targets("127.0.0.1:7001")[0].options == ()
    assert [target.name for target in targets("10.0.0.1:1, 10.0.0.2:1")] == ["ipv4:10.0.0.1:1,10.0.0.2:1"]
    assert [target.name for target in targets("buffer:7001")] == ["dns:///buffer:7001"]
    mixed = targets("[::1]:1,buffer:7001,10.0.0.1:1,")
    assert [target.name for target in mixed] == ["ipv4:10.0.0.1:1", "ipv6:[::1]:1", "dns:///buffer:7001"]
    with pytest.raises(InvalidInput, match="empty"):
        targets(" ,")


@pytest.mark.parametrize("kind", ["literal", "names"])
async def test_calls_go_round_past_the_dead_and_back(kind: str, replicas: Replicas, text: Any) -> None:
    await replicas.start("a", "b")
    stub = rpc.stub(EchoStub, addresses(replicas, kind), name="echo")
    # The very first calls, one replica never having been there: a call that is not repeated succeeds too.
    first = await answered(stub.Write, text)
    assert set(first) <= {"a", "b"}
    await until(stub.Write, text, {"a", "b"})
    even = await answered(stub.Write, text)
    assert even == {"a": 6, "b": 6}
    await replicas.stop("a")
    assert await answered(stub.Say, text) == {"b": 12}
    await replicas.start("c")
    await until(stub.Say, text, {"b", "c"})
    await replicas.start("a")
    await until(stub.Say, text, {"a", "b", "c"})


@pytest.mark.parametrize("kind", ["literal", "names"])
async def test_a_stream_stays_where_it_began(kind: str, replicas: Replicas, text: Any) -> None:
    await replicas.start(*NAMES)
    stub = rpc.stub(EchoStub, addresses(replicas, kind), name="echo")

    async def names() -> set[str]:
        return {message.value async for message in stub.Count(text("x"))}

    for found in await asyncio.gather(*(names() for _ in range(6))):
        assert len(found) == 1


@pytest.mark.parametrize("kind", ["literal", "names"])
async def test_a_call_that_died_is_repeated_elsewhere_only_when_it_may_be(
    kind: str, replicas: Replicas, text: Any
) -> None:
    await replicas.start("a", "b")
    stub = rpc.stub(EchoStub, addresses(replicas, kind), name="echo")
    await until(stub.Say, text, {"a", "b"})
    entered = asyncio.Event()

    async def hangs(request: StringValue, context: Any) -> StringValue:
        entered.set()
        await asyncio.sleep(30)
        return request

    replicas.apps["a"].handlers["Say"] = replicas.apps["a"].handlers["Write"] = hangs
    for method, survives in ((stub.Say, True), (stub.Write, False)):
        entered.clear()
        calls = [asyncio.create_task(method(text("x"), timeout=20)) for _ in range(2)]
        await entered.wait()
        before = replicas.apps["b"].calls["Write"]
        await replicas.stop("a")
        answers = await asyncio.gather(*calls, return_exceptions=True)
        values = sorted(getattr(answer, "value", type(answer).__name__) for answer in answers)
        assert values == (["b", "b"] if survives else ["NotReady", "b"])
        assert replicas.apps["b"].calls["Write"] - before <= 1
        await replicas.start("a")
        replicas.apps["a"].handlers["Say"] = replicas.apps["a"].handlers["Write"] = hangs
        if survives:
            replicas.apps["a"].handlers["Say"] = _says("a")
            await until(stub.Say, text, {"a", "b"})


async def test_all_dead_is_not_ready_at_the_deadline(replicas: Replicas, text: Any) -> None:
    stub = rpc.stub(EchoStub, addresses(replicas, "names"), name="echo")
    with pytest.raises(NotReady):
        await stub.Say(text("x"), timeout=1.5)


@contextmanager
def name_server(records: list[str]) -> Iterator[str]:
    """A DNS server that answers every question for A records with ``records``; yields HOST:PORT."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(0.1)
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            try:
                asked, sender = sock.recvfrom(2048)
            except TimeoutError:
                continue
            end = asked.index(b"\0", 12) + 5
            (kind,) = struct.unpack("!H", asked[end - 4 : end - 2])
            given = records if kind == 1 else []
            body = b"".join(
                b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(record) for record in given
            )
            head = asked[:2] + struct.pack("!HHHHH", 0x8580, 1, len(given), 0, 0)
            sock.sendto(head + asked[12:end] + body, sender)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"127.0.0.1:{sock.getsockname()[1]}"
    ended.set()
    thread.join()
    sock.close()


async def test_a_name_with_several_records(settings: ServiceSettings, text: Any) -> None:
    first = ReservedPort.free("127.0.0.1")
    running = []
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        update = {"listen": f"{host}:{first.port}", "port_handed_over": True}
        app = EchoApp(Say=_says(host))
        running.append(await start_server(app, settings.model_copy(update=update)))
    records = ["127.0.0.1", "127.0.0.2"]
    with name_server(records) as server:
        stub = rpc.stub(EchoStub, f"dns://{server}/buffer.test:{first.port}", name="echo")
        await until(stub.Say, text, {"127.0.0.1", "127.0.0.2"})
        # A replica more, found when a connection ends.
        records.append("127.0.0.3")
        await running[0].stop(0)
        await until(stub.Say, text, {"127.0.0.2", "127.0.0.3"})
        await rpc.close_channels()
    for server_ in running[1:]:
        await server_.stop(0)
    first.close()
