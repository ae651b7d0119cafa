"""The publish protocol, over real gRPC and real Redis."""

from __future__ import annotations

import asyncio

import pytest

from protos.headrace.v1 import refit_pb2
from refit_bridge.plan import TensorSpec
from services.runtime.errors import Fenced, NotReady, Refused
from tests.unit.refit.conftest import World
from tests.unit.refit.fakes import FakeEngine

FULL = [
    "gate closed",
    "pause",
    "begin 1",
    "load",
    "load",
    "finish",
    "resume",
    "probe",
    "commit 1",
    "gate open",
]


async def test_a_version_goes_through_the_whole_protocol_on_every_engine(world: World):
    await world.setup()
    answer = await world.publish(1)
    assert answer.version.digest == "digest1"
    assert answer.nbytes == 32
    for engine in ("e0", "e1"):
        assert world.of(engine) == FULL
        assert await world.state(engine) == "SERVING"
        assert world.engines[engine].version == answer.version
    assert all(engine.committed for engine in answer.engines)
    assert {"stage", "drain", "pause", "begin", "load", "finish", "resume", "probe", "commit"} <= set(
        answer.seconds
    )
    assert await world.versions() == {(0, 1): "committed"}


async def test_the_base_model_is_probed_and_never_transferred(world: World):
    await world.setup()
    answer = await world.publish(0)
    assert answer.version.digest == ""
    assert world.of("e0") == ["gate closed", "probe", "commit 0", "gate open"]
    assert world.trainer.stagings == 0


async def test_publishing_again_is_a_no_op_and_the_former_version_is_released(world: World):
    await world.setup()
    await world.publish(1)
    before = list(world.log)
    again = await world.publish(1)
    assert world.log == before
    assert again.version.digest == "digest1"
    assert {e.engine for e in again.engines if e.committed} == {"e0", "e1"}
    await world.publish(2)
    assert "trainer release 1" in world.log
    assert await world.versions() == {(0, 2): "committed", (0, 1): "superseded"}
    with pytest.raises(Refused, match="older than the committed"):
        await world.publish(1)


@pytest.mark.parametrize(("fault", "named"), [("image", "b.weight"), ("load", "a.weight")])
async def test_a_failing_engine_is_quarantined_by_name_and_the_others_go_on(
    world: World, fault: str, named: str
):
    await world.setup()
    await world.publish(0)
    world.engines["e1"].fault = fault
    answer = await world.publish(1)
    by_engine = {e.engine: e for e in answer.engines}
    assert by_engine["e0"].committed
    assert not by_engine["e1"].committed
    assert named in by_engine["e1"].error
    assert [check.name for check in by_engine["e1"].failures] == (["b.weight"] if fault == "image" else [])
    assert await world.state("e0") == "SERVING"
    assert await world.state("e1") == "QUARANTINED"
    # Never resumed, its gate never opened again.
    assert world.of("e1")[-1] in ("finish", "begin 1")
    assert "e1" in world.router.closed
    # The next publish is a full cycle and brings it back.
    world.engines["e1"].fault = ""
    await world.publish(2)
    assert await world.state("e1") == "SERVING"
    assert world.of("e1")[-1] == "gate open"


async def test_a_disagreeing_probe_blocks_the_commit_and_says_where(world: World):
    await world.setup(min_engines=2)
    await world.publish(0)
    world.engines["e1"].fault = "probe"
    with pytest.raises(Refused, match=r"differ by 0\.5 in sequence \d at position \d") as caught:
        await world.publish(1)
    assert caught.value.reason == "PROBE_DISAGREES"
    assert not [line for line in world.log if "commit 1" in line]
    assert await world.versions() == {(0, 0): "committed", (0, 1): "failed"}
    assert await world.state("e0") == "QUARANTINED"
    assert world.router.closed == {"e0", "e1"}
    # Publishing the same version again stages it afresh.
    world.engines["e1"].fault = ""
    await world.publish(1)
    assert world.trainer.stagings == 2
    assert await world.state("e0") == "SERVING"


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([TensorSpec("a.weight", "float32", (2, 3))], "missing b.weight"),
        (
            [
                TensorSpec("a.weight", "float32", (2, 3)),
                TensorSpec("b.weight", "bfloat16", (4,)),
                TensorSpec("c", "int8", (1,)),
            ],
            "extra c",
        ),
        (
            [TensorSpec("a.weight", "float32", (3, 2)), TensorSpec("b.weight", "bfloat16", (4,))],
            "changed a.weight was float32[2, 3], is float32[3, 2]",
        ),
    ],
)
async def test_another_name_set_ends_before_any_engine_is_touched(world: World, specs, named: str):
    await world.setup()
    await world.publish(1)
    world.trainer.specs = specs
    before = [line for line in world.log if not line.startswith("trainer")]
    with pytest.raises(Refused) as caught:
        await world.publish(2)
    assert named in str(caught.value)
    assert caught.value.reason == "PLAN_MISMATCH"
    assert [line for line in world.log if not line.startswith("trainer")] == before
    assert await world.state("e0") == "SERVING"


async def test_too_few_engines_is_not_ready_so_that_the_caller_waits(world: World):
    await world.setup(min_engines=3)
    with pytest.raises(NotReady, match="2 of 3 engines are ready"):
        await world.publish(0, timeout=0.5)
    await world.add_engine("e2")
    assert len((await world.publish(0)).engines) == 3


async def test_a_gate_that_does_not_drain_leaves_the_engine_alone(world: World):
    await world.setup()
    await world.publish(0)
    world.router.in_flight = 3
    with pytest.raises(NotReady, match="3 turns are still in flight"):
        await world.publish(1, timeout=3)
    assert "begin 1" not in world.of("e0")
    world.router.in_flight = 0
    await world.publish(1)
    assert await world.state("e0") == "SERVING"


async def test_older_epochs_are_refused_also_by_a_bridge_that_restarted(world: World):
    await world.setup(epoch=5)
    await world.publish(0, epoch=5)
    with pytest.raises(Fenced):
        await world.setup(epoch=4)
    with pytest.raises(Fenced):
        await world.publish(1, epoch=4)
    await world.stop_bridge()
    await world.start_bridge()
    with pytest.raises(Fenced):
        await world.setup(epoch=4)
    await world.setup(epoch=6)


async def test_a_late_engine_is_brought_to_the_committed_version_in_the_background(world: World):
    await world.setup()
    await world.publish(1)
    late = await world.add_engine("late")
    await world.until_state("late", "SERVING")
    assert world.of("late") == FULL
    assert late.version is not None
    assert late.version.digest == "digest1"
    assert world.trainer.stagings == 1


async def test_a_late_engine_is_probed_against_the_committed_version_not_the_current_one(world: World):
    await world.setup()
    await world.publish(1)
    world.trainer.number = 2  # the next step has been trained meanwhile
    await world.add_engine("late")
    await world.until_state("late", "SERVING")


async def test_generations_only_rise(world: World):
    await world.setup()
    for number in (1, 2, 3):
        await world.publish(number)
    seen = world.engines["e0"].generations + world.engines["e1"].generations
    assert len(set(seen)) == 6
    assert world.engines["e0"].generations == sorted(world.engines["e0"].generations)


async def test_a_restarted_bridge_finds_versions_and_serving_engines_again(world: World):
    await world.setup()
    await world.publish(1)
    before = list(world.log)
    await world.stop_bridge()
    await world.start_bridge()
    with pytest.raises(NotReady) as caught:
        await world.publish(1, timeout=0.5)
    assert caught.value.reason == "NO_RUN"
    await world.setup()
    await world.until_state("e0", "SERVING")
    await world.until_state("e1", "SERVING")
    assert (await world.publish(1)).version.digest == "digest1"
    assert world.log == before
    # The plan survived as well.
    world.trainer.specs = world.trainer.specs[:1]
    with pytest.raises(Refused, match=r"missing b\.weight"):
        await world.publish(2)


async def test_silent_engines_are_lost_and_come_back(world: World):
    await world.setup()
    await world.publish(1)
    world.beats.pop("e1").cancel()
    await world.until_state("e1", "LOST")
    answer = await world.publish(2)
    assert [engine.engine for engine in answer.engines] == ["e0"]
    await world.beat(world.engines["e1"])
    await world.until_state("e1", "SERVING")
    assert world.engines["e1"].weights == 2


async def test_an_engine_that_dies_in_the_middle_does_not_hold_up_the_publish(world: World):
    await world.setup()
    await world.publish(0)
    world.engines["e1"].fault = "hang"
    world.beats.pop("e1").cancel()
    answer = await asyncio.wait_for(world.publish(1), 8)
    by_engine = {e.engine: e for e in answer.engines}
    assert by_engine["e0"].committed
    assert "gone" in by_engine["e1"].error


async def test_a_publish_goes_on_when_its_caller_hangs_up(world: World):
    await world.setup()
    world.engines["e0"].fault = "hang"
    call = asyncio.create_task(world.publish(1))
    while "begin 1" not in world.of("e0"):
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    world.engines["e0"].fault = ""
    world.engines["e0"].hang.set()
    answer = await world.publish(1)
    assert {e.engine for e in answer.engines if e.committed} == {"e0", "e1"}
    assert world.engines["e0"].generations == [world.engines["e0"].generation]


async def test_a_restore_publishes_under_a_new_incarnation_with_the_same_number(world: World):
    await world.setup()
    await world.publish(3)
    answer = await world.publish(3, incarnation=1)
    assert answer.version.incarnation == 1
    assert world.of("e0").count("finish") == 2


async def test_watchers_see_updating_then_serving(world: World):
    await world.setup()
    await world.publish(0)
    seen: list[str] = []

    async def watch() -> None:
        async for roster in world.stub.WatchRoster(refit_pb2.WatchRosterRequest(), timeout=10):
            seen.extend(refit_pb2.EngineState.Name(e.state) for e in roster.engines if e.info.engine == "e0")

    task = asyncio.create_task(watch())
    while not seen:
        await asyncio.sleep(0.01)
    await world.publish(1)
    while seen[-1] != "ENGINE_STATE_SERVING" or "ENGINE_STATE_UPDATING" not in seen:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_publish_interrupts_the_sync_of_a_late_engine_and_takes_it_along(world: World):
    await world.setup()
    await world.publish(1)
    late = FakeEngine(world.log, "late")
    late.fault = "hang"
    await world.add_engine("late", late)
    while "begin 1" not in world.of("late"):
        await asyncio.sleep(0.01)
    late.fault = ""
    answer = await world.publish(2)
    assert {e.engine for e in answer.engines if e.committed} == {"e0", "e1", "late"}
    assert late.weights == 2
    assert late.generations == sorted(set(late.generations))


async def test_another_run_starts_with_a_ledger_of_its_own(world: World):
    await world.setup()
    await world.publish(4)
    first, world.run = world.run, f"{world.run}-next"
    await world.setup()
    with pytest.raises(NotReady, match="0 of 1 engines"):
        await world.publish(0, timeout=0.5)
    for engine in world.engines.values():
        engine.run, engine.version, engine.weights = world.run, None, 0
    await asyncio.gather(*(world.beat(engine) for engine in world.engines.values()))
    assert len((await world.publish(0)).engines) == 2
    assert await world.versions() == {(0, 0): "committed"}
    world.run = first
    assert await world.versions() == {(0, 4): "committed"}
