"""Turns of one engine while its weights change: withheld, continued, given up. vLLM is stood in for here."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.engine.core_types import ABORTED, LabelSpan, Sampled
from rollout_svc.engine.turns import Turns
from rollout_svc.engine.updates import Updates
from rollout_svc.engine.versions import Versions
from rollout_svc.turns.seeds import continuation_seed, turn_seed
from services.runtime.errors import Corrupt, InvalidInput, NotReady, Unsupported

KEEP, ABORT = rollout_pb2.PAUSE_MODE_KEEP, rollout_pb2.PAUSE_MODE_ABORT


class Request:
    """One generation; it gives a token for each ``step`` of the core."""

    def __init__(self, ids, sampling, seed, salt):
        self.prompt, self.limit, self.seed, self.salt = list(ids), sampling.max_new_tokens, seed, salt
        self.labels = []
        self.done = asyncio.get_running_loop().create_future()

    def answer(self, finish, labelled):
        spans = [LabelSpan(x, self.labels.count(x)) for x in dict.fromkeys(self.labels)]
        count = len(self.labels)
        ids = [100 + len(self.prompt) + i for i in range(count)]
        self.done.set_result(Sampled(ids, [-1.0] * count, finish, "", 0, spans if labelled else None))


class Core:
    """vLLM as its contract says: frozen by keep, ended by abort, tokens stamped with the present label."""

    def __init__(self, *, labels=True, images=False, turns_at_once=8):
        self.labels_tokens, self.has_images, self.turns_at_once = labels, images, turns_at_once
        self.requests = []
        self.running = []
        self.present = "0:0:0"
        self.modes = []
        self.fault = None

    async def sample(self, ids, sampling, *, seed, salt):
        request = Request(ids, sampling, seed, salt)
        self.requests.append(request)
        self.running.append(request)
        return await request.done

    def step(self):
        for request in list(self.running):
            request.labels.append(self.present)
            if len(request.labels) == request.limit:
                self.end(request, "length")

    def end(self, request, finish):
        self.running.remove(request)
        request.answer(finish, self.labels_tokens)

    async def pause(self, mode, *, clear_cache):
        self.modes.append(mode)
        if mode == "abort":
            for request in list(self.running):
                self.end(request, ABORTED)

    async def resume(self):
        self.modes.append("resume")

    async def start_update(self, generation, plan):
        pass

    async def update(self, info):
        if self.fault is not None:
            raise self.fault

    async def finish_update(self, label):
        self.present = label
        return [{"checked": 1, "failures": []}]


class Rendering:
    async def rendered(self, request, prefix):
        return [1, 2, 3]

    async def message(self, request, ids, finish, stop_string):
        return types_pb2.Message(role="assistant")


class Engine:
    """Turns and updates over one core, and what the bridge does to them."""

    def __init__(self, core, *, hold_seconds=60.0):
        self.core = core
        self.versions = Versions("r")
        self.turns = Turns("e", core, Rendering(), self.versions)
        self.updates = Updates(core, self.versions, ("shm",), lambda: None, hold_seconds=hold_seconds)
        self.versions.commit("r", 0, types_pb2.PolicyVersion())

    def fly(self, sample=0, tokens=4, **sampling):
        params = types_pb2.SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_new_tokens=tokens, **sampling
        )
        key = types_pb2.SampleKey(run="r", book="train", group=1, sample=sample)
        request = rollout_pb2.TurnRequest(key=key, run_seed=7, sampling=params)
        return asyncio.create_task(self.turns.turn(request))

    async def pause(self, mode=KEEP):
        await self.updates.pause(rollout_pb2.PauseEngineRequest(mode=mode))

    async def begin(self, number, generation=None):
        request = rollout_pb2.BeginUpdateRequest(
            run="r", generation=generation or number, transport="shm", plan_hash="p",
            version=types_pb2.PolicyVersion(number=number), plan=[rollout_pb2.TensorSpec(name="w")],
        )  # fmt: skip
        assert await self.updates.begin(request)

    async def load(self, number):
        await self.updates.load(rollout_pb2.LoadWeightsRequest(generation=number))

    async def update(self, number):
        await self.pause()
        await self.begin(number)
        await self.load(number)
        await self.updates.finish(number)
        await self.updates.resume()

    async def commit(self, number):
        version = types_pb2.PolicyVersion(number=number, digest=f"d{number}")
        await self.updates.commit(
            rollout_pb2.CommitVersionRequest(run="r", generation=number, version=version)
        )


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def versions(answer):
    return np.frombuffer(answer.versions, "<i4").tolist()


async def test_tokens_of_the_new_weights_are_withheld_until_their_commit():
    engine = Engine(Core())
    mixed, old = engine.fly(0), engine.fly(1, tokens=2)
    await settle()
    engine.core.step()
    engine.core.step()
    await engine.update(1)
    late = engine.fly(2)
    engine.core.step()
    engine.core.step()
    await settle()
    assert versions(await old) == [0, 0]
    assert not mixed.done()
    assert len(engine.core.requests) == 2, "a turn began before the commit"
    await engine.commit(1)
    answer = await mixed
    assert versions(answer) == [0, 0, 1, 1]
    assert [v.digest for v in answer.policy_versions] == ["", "d1"]
    await settle()
    assert engine.core.requests[-1].salt == "r:0:1"
    late.cancel()


async def test_what_a_failed_update_sampled_is_never_answered():
    engine = Engine(Core())
    ended, running = engine.fly(0, tokens=2), engine.fly(1, tokens=9)
    await settle()
    engine.core.step()
    await engine.update(1)
    engine.core.step()
    await settle()
    assert not ended.done()
    await engine.pause(ABORT)
    for turn in (ended, running):
        with pytest.raises(NotReady):
            await turn
    # The same version again, complete: its label is another one.
    await engine.begin(1, generation=2)
    await engine.load(2)
    await engine.updates.finish(2)
    await engine.updates.resume()
    fresh = engine.fly(2, tokens=1)
    with pytest.raises(NotReady):
        await fresh


async def test_a_transfer_that_fails_frees_its_turns_at_once():
    engine = Engine(Core())
    turn = engine.fly(0)
    await settle()
    await engine.pause()
    await engine.begin(1)
    engine.core.fault = InvalidInput("Tensor w arrived damaged")
    with pytest.raises(Corrupt):
        await engine.load(1)
    assert engine.core.modes == ["keep", "abort"]
    with pytest.raises(NotReady):
        await turn


async def test_without_labels_a_turn_is_broken_off_and_continued_from_its_exact_ids():
    engine = Engine(Core(labels=False))
    turn = engine.fly(0, tokens=5)
    await settle()
    engine.core.step()
    engine.core.step()
    await engine.update(1)
    assert engine.core.modes == ["abort", "resume"]
    await settle()
    assert len(engine.core.requests) == 1
    await engine.commit(1)
    await settle()
    first, second = engine.core.requests
    assert second.prompt == [1, 2, 3, 103, 104]
    assert (second.limit, second.salt) == (3, "r:0:1")
    seed = turn_seed(7, 1, 0, 0)
    assert (first.seed, second.seed) == (seed, continuation_seed(seed, 1))
    for _ in range(3):
        engine.core.step()
    answer = await turn
    assert versions(answer) == [0, 0, 1, 1, 1]
    assert np.frombuffer(answer.sampled_ids, "<i4").tolist() == [103, 104, 105, 106, 107]


async def test_without_labels_a_turn_that_had_no_token_yet_begins_anew_with_its_own_seed():
    engine = Engine(Core(labels=False))
    turn = engine.fly(0, tokens=1)
    await settle()
    await engine.update(1)
    await engine.commit(1)
    await settle()
    assert engine.core.requests[0].seed == engine.core.requests[1].seed
    engine.core.step()
    assert versions(await turn) == [1]


async def test_without_labels_a_turn_with_stop_strings_is_done_again_as_a_whole():
    engine = Engine(Core(labels=False))
    turn = engine.fly(0, stop=["stop"])
    await settle()
    await engine.update(1)
    with pytest.raises(NotReady):
        await turn


async def test_a_bridge_that_falls_silent_keeps_nobody():
    engine = Engine(Core(), hold_seconds=0.05)
    watch = asyncio.create_task(engine.updates.watch())
    turn = engine.fly(0, tokens=1)
    await settle()
    await engine.pause()
    async with asyncio.timeout(5):
        while engine.versions.paused:
            await asyncio.sleep(0.01)
    assert engine.core.modes == ["keep", "resume"]
    engine.core.step()
    assert versions(await turn) == [0]

    turn = engine.fly(1)
    await settle()
    await engine.pause()
    await engine.begin(1)
    with pytest.raises(NotReady):
        await asyncio.wait_for(turn, 5)
    assert engine.versions.paused
    watch.cancel()


async def test_a_leaving_engine_gives_up_what_an_update_holds_back():
    engine = Engine(Core())
    turn = engine.fly(0)
    await settle()
    await engine.pause()
    await engine.updates.leave()
    with pytest.raises(NotReady):
        await turn


async def test_only_as_many_turns_are_at_vllm_as_have_a_place():
    engine = Engine(Core(turns_at_once=2))
    turns = [engine.fly(sample, tokens=1) for sample in range(3)]
    await settle()
    assert len(engine.core.requests) == 2
    await engine.update(1)
    engine.core.step()
    await settle()
    assert len(engine.core.requests) == 2, "the third begins under a committed version only"
    await engine.commit(1)
    await settle()
    engine.core.step()
    assert [versions(answer) for answer in await asyncio.gather(*turns)] == [[1], [1], [1]]


async def test_models_with_a_vision_encoder_are_refused_and_untouched():
    engine = Engine(Core(images=True))
    with pytest.raises(Unsupported, match="vision"):
        await engine.pause()
    assert not engine.versions.carrying
    assert engine.core.modes == []
