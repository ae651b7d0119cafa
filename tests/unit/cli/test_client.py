"""The Python client against a controller that goes away and comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from services.client import AsyncClient, Client
from services.recipe import Recipe, RecipeError
from services.runtime.errors import NotFound, NotReady, TimedOut, to_status
from services.runtime.ports import ReservedPort

EVENTS = 6


class Controller(runs_pb2_grpc.RunsServicer):
    """A controller with one run of EVENTS events; its stream breaks in the middle as often as it is told."""

    def __init__(self, breaks: int = 0) -> None:
        self.submitted: list[runs_pb2.SubmitRequest] = []
        self._breaks = breaks

    async def Submit(self, request: runs_pb2.SubmitRequest, context: Any) -> runs_pb2.Run:
        self.submitted.append(request)
        return runs_pb2.Run(run=request.run or "made-here", status=runs_pb2.RUN_STATUS_QUEUED)

    async def Get(self, request: runs_pb2.GetRunRequest, context: Any) -> runs_pb2.Run:
        if request.run != "r1":
            await context.abort(*to_status(NotFound(f"There is no run {request.run!r}")))
        return runs_pb2.Run(run="r1", status=runs_pb2.RUN_STATUS_COMPLETED)

    async def Watch(
        self, request: runs_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[runs_pb2.RunEvent]:
        for sequence in range(max(1, request.from_sequence), EVENTS + 1):
            yield runs_pb2.RunEvent(sequence=sequence, kind="step", step=sequence)
            if self._breaks and sequence % 2 == 0:
                self._breaks -= 1
                await context.abort(*to_status(NotReady("going down")))


@contextmanager
def serving(controller: Controller) -> Iterator[str]:
    """Serve on a thread of its own; yields HOST:PORT."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        runs_pb2_grpc.add_RunsServicer_to_server(controller, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def test_watch_gives_each_event_once_although_the_stream_breaks() -> None:
    with serving(Controller(breaks=2)) as address, Client(address) as client:
        assert [event.sequence for event in client.watch("r1")] == list(range(1, EVENTS + 1))
        assert [event.sequence for event in client.watch("r1", from_sequence=5)] == [5, 6]


def test_watch_may_be_left_early() -> None:
    with serving(Controller()) as address, Client(address) as client:
        for event in client.watch("r1"):
            assert event.sequence == 1
            break
        assert client.get("r1").run == "r1"


async def test_watch_gives_up_on_a_controller_that_stays_away() -> None:
    with ReservedPort.free() as nobody:
        async with AsyncClient(nobody.address, patience_s=0.5) as client:
            with pytest.raises((NotReady, TimedOut)):
                await anext(client.watch("r1"))


def test_submit_sends_the_whole_recipe_with_absolute_paths(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    controller = Controller()
    with serving(controller) as address, Client(address) as client:
        run = client.submit(recipe, ["data.train.data_path=rows.jsonl", "grpo.seed=9"])
        assert run.run == "made-here"
        client.submit(
            {
                "policy": {"model_name": "org/m"},
                "data": {"train": {"data_path": "x"}},
                "grpo": {"val_period": 0},
            }
        )
        with pytest.raises(RecipeError, match="Unknown key"):
            client.submit(recipe, ["grpo.sed=9"])
        with pytest.raises(NotFound):
            client.get("r2")
    assert len(controller.submitted) == 2
    sent = Recipe.model_validate_json(controller.submitted[0].recipe_json)
    assert sent.data.train.data_path == str(tmp_path / "rows.jsonl")
    assert json.loads(controller.submitted[0].origins_json)["grpo.seed"] == "override"
