from __future__ import annotations

import numpy as np
import pytest

from protos.headrace.v1 import rollout_pb2
from refit_bridge import probe
from refit_bridge.roster import JOINING, LOST, QUARANTINED, RENDER_ONLY, SERVING, UPDATING, Roster
from refit_bridge.versions import make
from services.runtime.errors import Corrupt


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roster(clock: Clock) -> Roster:
    return Roster(lost_after=10, clock=clock)


def info(
    engine: str, *, version=None, run="r", address="", name="vllm", ready=True
) -> rollout_pb2.EngineInfo:
    return rollout_pb2.EngineInfo(
        engine=engine, name=name, address=address or engine, run=run, ready=ready, version=version
    )


async def test_only_the_exact_committed_version_serves_at_registration(roster: Roster):
    await roster.begin_run("r", make((0, 2), "d"))
    await roster.register(info("same", version=make((0, 2), "d")))
    await roster.register(info("other", version=make((0, 2), "x")))
    await roster.register(info("old", version=make((0, 1), "d")))
    await roster.register(info("elsewhere", version=make((0, 2), "d"), run="q"))
    await roster.register(info("starting", version=make((0, 2), "d"), ready=False))
    await roster.register(info("render", name="render"))
    states = {m.engine: m.state for m in roster.members}
    assert states.pop("same") == SERVING
    assert states.pop("render") == RENDER_ONLY
    assert set(states.values()) == {JOINING}


async def test_a_heartbeat_neither_frees_the_quarantined_nor_disturbs_an_update(roster: Roster):
    await roster.begin_run("r", make((0, 2)))
    for engine, state in (("q", QUARANTINED), ("u", UPDATING)):
        await roster.register(info(engine))
        await roster.set_state(engine, state)
        await roster.register(info(engine, version=make((0, 2))))
        assert roster.get(engine).state == state


async def test_a_heartbeat_from_before_the_commit_does_not_undo_it_but_a_later_one_does(
    roster: Roster, clock: Clock
):
    await roster.begin_run("r", make((0, 2)))
    await roster.register(info("e"))
    await roster.set_state("e", SERVING, committed=make((0, 2)))
    await roster.register(info("e"))
    assert roster.get("e").state == SERVING
    clock.now += 6
    await roster.register(info("e"))
    assert roster.get("e").state == JOINING


async def test_silence_loses_an_engine_and_a_new_one_replaces_it_at_its_address(roster: Roster, clock: Clock):
    await roster.begin_run("r", None)
    await roster.register(info("one", address="h:1"))
    clock.now += 11
    await roster.expire()
    assert roster.get("one").state == LOST
    assert roster.gone("one")
    await roster.register(info("two", address="h:1"))
    assert [m.engine for m in roster.members] == ["two"]


async def test_a_lost_engine_is_forgotten_after_a_while(roster: Roster, clock: Clock):
    await roster.register(info("one"))
    for seconds in (11, 121):
        clock.now += seconds
        await roster.expire()
    assert roster.members == []


def rows(*values: list[float]) -> list[np.ndarray]:
    return [np.array(v, np.float32) for v in values]


def test_the_probe_names_the_worst_place_and_leaves_out_the_first_token():
    found = probe.compare(rows([9, 1, 2], [0, 1, 2.5]), rows([0, 1, 2], [0, 1.25, 2]), 0.4)
    assert (found.error, found.sequence, found.position, found.ok) == (0.5, 1, 2, False)
    assert probe.compare(rows([9, 1, 2]), rows([0, 1, 2]), 0.0).ok


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_disagrees(bad: float):
    assert not probe.compare(rows([0, bad]), rows([0, 1]), 10.0).ok
    assert not probe.compare(rows([0, bad]), rows([0, bad]), 10.0).ok


def test_an_answer_of_another_length_is_corrupt():
    answer = rollout_pb2.ScoreTokensResponse(logprobs=[bytes(8)])
    with pytest.raises(Corrupt, match="lengths"):
        probe.read(answer, [bytes(12)], where="engine e")
