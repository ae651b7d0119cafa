"""The router with engines in this process: affinity, failover, gates, setups, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from rollout_svc.router import engine as engine_module
from rollout_svc.router.app import Router
from rollout_svc.router.busy import BusyClock
from rollout_svc.settings import RouterSettings
from services.runtime import rpc
from services.runtime.errors import Fenced, InvalidInput, NotReady
from services.runtime.service import ServiceApp, start_server
from services.runtime.settings import ServiceSettings

RUN = "r"
SERVING = refit_pb2.ENGINE_STATE_SERVING


class FakeEngine(ServiceApp, rollout_pb2_grpc.EngineServicer):
    """Answers turns with its name; ``hold`` keeps them, ``error`` fails them."""

    name = "engine"

    def __init__(self, engine):
        self.engine = engine
        self.run = ""
        self.turns = 0
        self.setups = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.error = None
        self.setup_error = None
        self.address = ""

    def register(self, server):
        rollout_pb2_grpc.add_EngineServicer_to_server(self, server)
        return ("headrace.v1.Engine",)

    def info(self):
        return rollout_pb2.EngineInfo(
            engine=self.engine, name="vllm", address=self.address, run=self.run, ready=True
        )

    async def Setup(self, request, context):
        self.setups += 1
        if self.setup_error is not None:
            raise self.setup_error
        self.run = request.run
        return self.info()

    async def Turn(self, request, context):
        self.turns += 1
        if self.error is not None:
            raise self.error
        await self.hold.wait()
        return rollout_pb2.TurnResponse(engine=self.engine, sampled_ids=b"\0" * 8)

    async def Render(self, request, context):
        return rollout_pb2.RenderResponse(rendered=[rollout_pb2.Rendered(ids=b"\0" * 4)])


class FakeBridge(ServiceApp, refit_pb2_grpc.RefitServicer):
    """Sends the roster that the test says."""

    name = "refit"

    def __init__(self):
        self.engines = []
        self.states = {}
        self.books = {}
        self.changed = asyncio.Condition()
        self.ended = False

    def register(self, server):
        refit_pb2_grpc.add_RefitServicer_to_server(self, server)
        return ("headrace.v1.Refit",)

    async def draining(self):
        self.ended = True
        await self.notify()

    async def notify(self):
        async with self.changed:
            self.changed.notify_all()

    async def WatchRoster(self, request, context):
        while not self.ended:
            entries = [
                refit_pb2.RosterEntry(
                    info=e.info(),
                    state=self.states.get(e.engine, SERVING),
                    book=self.books.get(e.engine, ""),
                )
                for e in self.engines
            ]
            yield refit_pb2.Roster(engines=entries)
            async with self.changed:
                await self.changed.wait()


class Rig:
    def __init__(self, home):
        self.home = home
        self.bridge = FakeBridge()
        self.servers = []

    async def start(self, names):
        refit = await self.serve(self.bridge)
        for name in names:
            await self.add(name, notify=False)
        settings = RouterSettings(listen="127.0.0.1:0", refit=refit.address, home=self.home)
        self.app = Router(settings)
        self.server = await start_server(self.app, settings)
        self.servers.append(self.server)
        self.router = rpc.stub(rollout_pb2_grpc.RolloutStub, self.server.address, name="rollout")
        return self

    async def serve(self, app):
        server = await start_server(app, ServiceSettings(home=self.home))
        self.servers.append(server)
        return server

    async def add(self, name, *, notify=True, run=""):
        engine = FakeEngine(name)
        engine.run = run
        engine.server = await self.serve(engine)
        engine.address = engine.server.address
        self.bridge.engines.append(engine)
        if notify:
            await self.bridge.notify()
        return engine

    async def setup(self, run=RUN):
        await self.router.Setup(rollout_pb2.RolloutSetupRequest(run=run, policy_json="{}", seed=1))
        await self.bridge.notify()
        await self.until(lambda: all(e.entry.info.run == run for e in self.app._fleet.engines.values()))

    async def until(self, condition, seconds=5.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "condition not met in time"
            await asyncio.sleep(0.01)

    async def close(self):
        for server in reversed(self.servers):
            await server.stop(0)
        await rpc.close_channels()


@pytest.fixture
async def rig(tmp_path):
    """``await rig("a", "b")``: a router with these engines, set up."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*names, setup=True):
            made = Rig(tmp_path)
            stack.push_async_callback(made.close)
            await made.start(names)
            await made.until(lambda: len(made.app._fleet.engines) == len(names))
            if setup:
                await made.setup()
            return made

        yield make


def turn(group=0, sample=0, run=RUN, book="train"):
    return rollout_pb2.TurnRequest(
        key=types_pb2.SampleKey(run=run, book=book, group=group, sample=sample), run_seed=1
    )


async def test_a_sample_keeps_its_engine_and_load_is_spread(rig):
    made = await rig("a", "b")
    answers = [await asyncio.gather(*(made.router.Turn(turn(g)) for g in range(8))) for _ in range(3)]
    homes = [{answers[i][g].engine for i in range(3)} for g in range(8)]
    assert all(len(home) == 1 for home in homes)
    for engine in made.bridge.engines:
        engine.hold.clear()
    flying = [asyncio.create_task(made.router.Turn(turn(100 + g))) for g in range(8)]
    await made.until(lambda: all(e.in_flight == 4 for e in made.app._fleet.engines.values()))
    for engine in made.bridge.engines:
        engine.hold.set()
    await asyncio.gather(*flying)


async def test_a_turn_moves_when_its_engine_dies(rig):
    made = await rig("a", "b")
    first, second = made.bridge.engines
    first.hold.clear()
    second.hold.clear()
    flying = [asyncio.create_task(made.router.Turn(turn(g))) for g in range(4)]
    await made.until(lambda: first.turns == 2)
    second.hold.set()
    await first.server.stop(0)
    assert {answer.engine for answer in await asyncio.gather(*flying)} == {"b"}


async def test_a_lone_engine_that_fails_is_tried_again_when_it_is_back(rig):
    made = await rig("a")
    (engine,) = made.bridge.engines
    engine.error = NotReady("starting")
    flying = asyncio.create_task(made.router.Turn(turn()))
    await made.until(lambda: engine.turns >= 1)
    engine.error = None
    assert (await flying).engine == "a"


async def test_a_wrong_request_is_not_repeated(rig):
    made = await rig("a", "b")
    for engine in made.bridge.engines:
        engine.error = InvalidInput("bad", where="prompt", reason="PROMPT_TOO_LONG")
    with pytest.raises(InvalidInput) as refused:
        await made.router.Turn(turn())
    assert refused.value.reason == "PROMPT_TOO_LONG"
    assert sum(engine.turns for engine in made.bridge.engines) == 1
    for engine in made.bridge.engines:
        engine.error = Fenced("old")
    with pytest.raises(Fenced):
        await made.router.Turn(turn())


async def test_pause_drains_and_holds_back_what_comes(rig):
    made = await rig("a")
    (engine,) = made.bridge.engines
    engine.hold.clear()
    flying = asyncio.create_task(made.router.Turn(turn(1)))
    await made.until(lambda: engine.turns == 1)
    gate = rollout_pb2.GateRequest(run=RUN, engines=["a"], drain_timeout_s=0.05)
    assert (await made.router.Pause(gate)).in_flight == 1
    late = asyncio.create_task(made.router.Turn(turn(2)))
    await made.until(lambda: made.app._fleet.waiting == 1)
    engine.hold.set()
    gate.drain_timeout_s = 5
    assert (await made.router.Pause(gate)).in_flight == 0
    await flying
    await made.bridge.notify()  # a roster must not open a closed gate
    await asyncio.sleep(0.05)
    assert engine.turns == 1
    await made.router.Resume(gate)
    assert (await late).engine == "a"


async def test_a_closed_gate_sends_turns_to_the_other_engine(rig):
    made = await rig("a", "b")
    await made.router.Turn(turn(1))
    await made.router.Pause(rollout_pb2.GateRequest(run=RUN, engines=["a"], drain_timeout_s=1))
    answers = [await made.router.Turn(turn(g)) for g in range(6)]
    assert {answer.engine for answer in answers} == {"b"}
    await made.router.Pause(rollout_pb2.GateRequest(run=RUN, drain_timeout_s=1))
    with pytest.raises(NotReady, match="gate closed"):
        await made.router.Turn(turn(9), timeout=0.4)


async def test_only_serving_engines_get_turns(rig):
    made = await rig("a", "b")
    made.bridge.states["a"] = refit_pb2.ENGINE_STATE_UPDATING
    await made.bridge.notify()
    await made.until(lambda: made.app._fleet.engines["a"].entry.state == refit_pb2.ENGINE_STATE_UPDATING)
    assert {(await made.router.Turn(turn(g))).engine for g in range(4)} == {"b"}
    made.bridge.states["b"] = refit_pb2.ENGINE_STATE_QUARANTINED
    await made.bridge.notify()
    with pytest.raises(NotReady, match="quarantined"):
        await made.router.Turn(turn(), timeout=0.4)
    rendered = await made.router.Render(rollout_pb2.RenderRequest(run=RUN))
    assert len(rendered.rendered) == 1


async def test_late_engines_are_set_up_and_a_new_run_sets_up_all(rig):
    made = await rig("a")
    late = await made.add("b")
    await made.until(lambda: late.run == RUN)
    assert made.bridge.engines[0].setups == 1
    await made.setup("other")
    assert [engine.setups for engine in made.bridge.engines] == [2, 2]
    with pytest.raises(NotReady) as wrong:
        await made.router.Turn(turn(run=RUN), timeout=0.4)
    assert wrong.value.reason == "NO_RUN"


async def test_what_an_engine_refuses_is_the_answer_to_setup(rig):
    made = await rig("a", setup=False)
    with pytest.raises(NotReady, match="no run"):
        await made.router.Turn(turn(), timeout=0.4)
    made.bridge.engines[0].setup_error = InvalidInput("There is no model directory /nowhere")
    with pytest.raises(InvalidInput, match="/nowhere"):
        await made.router.Setup(rollout_pb2.RolloutSetupRequest(run=RUN, policy_json="{}"))
    made.bridge.engines[0].setup_error = None
    await made.setup()
    assert (await made.router.Turn(turn())).engine == "a"


async def test_the_roster_is_found_again_and_the_last_one_counts_meanwhile(rig):
    made = await rig("a")
    bridge_server = made.servers.pop(0)
    await bridge_server.stop(0)
    assert (await made.router.Turn(turn())).engine == "a"


async def test_status_counts(rig):
    made = await rig("a")
    for group in range(3):
        await made.router.Turn(turn(group))
    status = await made.router.Status(rollout_pb2.RolloutStatusRequest())
    assert (status.run, status.turns, status.sampled_tokens, status.in_flight) == (RUN, 3, 6, 0)
    assert list(status.engines) == ["a"]


async def test_turns_of_a_book_go_to_the_engines_set_aside_for_it_and_no_others(rig):
    made = await rig("a", "b", "c")
    book = "validation/3"
    assert "c" not in {(await made.router.Turn(turn(g, book=book))).engine for g in range(6)}
    made.bridge.books["c"] = book
    await made.bridge.notify()
    await made.until(lambda: made.app._fleet.engines["c"].entry.book == book)
    # Samples that had another engine before move, too.
    assert {(await made.router.Turn(turn(g, book=book))).engine for g in range(6)} == {"c"}
    assert "c" not in {(await made.router.Turn(turn(g))).engine for g in range(6)}
    assert "c" not in {(await made.router.Turn(turn(g, book="validation/4"))).engine for g in range(6)}
    made.bridge.engines[2].hold.clear()
    flying = asyncio.create_task(made.router.Turn(turn(99, book=book)))
    await made.until(lambda: made.app._fleet.engines["c"].in_flight == 1)
    made.bridge.states["c"] = refit_pb2.ENGINE_STATE_LOST
    await made.bridge.notify()
    await made.until(lambda: made.app._fleet.engines["c"].entry.state == refit_pb2.ENGINE_STATE_LOST)
    assert (await made.router.Turn(turn(98, book=book))).engine in ("a", "b")
    made.bridge.engines[2].hold.set()
    await flying


async def test_a_gate_that_does_not_wait_says_how_many_turns_are_in_flight(rig):
    made = await rig("a")
    (engine,) = made.bridge.engines
    engine.hold.clear()
    flying = [asyncio.create_task(made.router.Turn(turn(g))) for g in range(3)]
    await made.until(lambda: engine.turns == 3)
    gate = rollout_pb2.GateRequest(run=RUN, engines=["a"])
    started = time.monotonic()
    assert (await made.router.Pause(gate)).in_flight == 3
    assert time.monotonic() - started < 0.5
    late = asyncio.create_task(made.router.Turn(turn(9)))
    await made.until(lambda: made.app._fleet.waiting == 1)
    engine.hold.set()
    await asyncio.gather(*flying)
    assert engine.turns == 3
    await made.router.Resume(gate)
    await late


async def test_an_engine_that_leaves_finishes_its_turns_and_late_ones_move(rig, monkeypatch):
    monkeypatch.setattr(engine_module, "LEAVE_SECONDS", 0.5)
    made = await rig("a", "b")
    first, second = made.bridge.engines
    first.hold.clear()
    flying = [asyncio.create_task(made.router.Turn(turn(g))) for g in range(4)]
    await made.until(lambda: first.turns == 2)
    made.bridge.engines.remove(first)
    await made.bridge.notify()
    await made.until(lambda: "a" not in made.app._fleet.engines)
    assert {(await made.router.Turn(turn(g))).engine for g in range(10, 14)} == {"b"}
    first.hold.set()
    assert sorted(answer.engine for answer in await asyncio.gather(*flying)) == ["a", "a", "b", "b"]

    second.hold.clear()
    late = asyncio.create_task(made.router.Turn(turn(20)))
    await made.until(lambda: second.turns == 7)
    made.bridge.engines.remove(second)
    third = await made.add("c")
    await made.until(lambda: third.run == RUN)
    await made.bridge.notify()
    assert (await late).engine == "c"
    second.hold.set()


def test_busy_seconds_are_the_union_of_the_turns():
    now = [0.0]
    busy = BusyClock(lambda: now[0])
    with busy.turn():
        now[0] = 1.0
        with busy.turn():
            now[0] = 3.0
        assert busy.seconds == 3.0
    now[0] = 10.0
    assert busy.seconds == 3.0
    with busy.turn():
        busy.restart()
        now[0] = 12.0
        assert busy.seconds == 2.0
