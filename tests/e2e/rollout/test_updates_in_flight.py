"""Weights change under turns in flight: each token has its own version, none of a failed one is answered."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest

from protos.headrace.v1 import rollout_pb2, types_pb2
from refit_bridge.sender import ShmSender, TensorSource
from rollout_svc.turns.ids import ids_bytes
from services.runtime.errors import Corrupt, NotReady
from tests.e2e.rollout.conftest import RUN, turn
from tests.e2e.rollout.test_updates import begin, load

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
KEEP, ABORT = rollout_pb2.PAUSE_MODE_KEEP, rollout_pb2.PAUSE_MODE_ABORT


class Trainer:
    """The reference model, moved from version to version; ``models`` by version number."""

    def __init__(self, model):
        self.models = {}
        self._model = model
        self._sender = ShmSender("e2e-in-flight", chunk_bytes=60_000)

    def stage(self, number):
        import torch

        self.models.setdefault(number - 1, copy.deepcopy(self._model))
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        self.models[number] = copy.deepcopy(self._model)
        tensors = {k: v for k, v in self._model.state_dict().items() if k != "lm_head.weight"}
        return self._sender.stage(0, number, TensorSource(tensors), torch.float32)

    def logprobs(self, number, ids):
        import torch

        with torch.no_grad():
            scores = self.models[number](torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return np.array([0.0, *(scores[i - 1, ids[i]].item() for i in range(1, len(ids)))])

    def close(self):
        self._sender.close()


@pytest.fixture(scope="module")
def trainer(reference):
    made = Trainer(reference.model)
    yield made
    made.close()


async def publish(engine, staged, generation, number, *, clear_cache=True, abort=False):
    """What the bridge does, up to (not including) the commit."""
    mode = ABORT if abort else KEEP
    await engine.Pause(rollout_pb2.PauseEngineRequest(mode=mode, clear_cache=clear_cache))
    await begin(engine, staged, generation, number)
    await load(engine, staged, generation)
    done = await engine.FinishUpdate(rollout_pb2.FinishUpdateRequest(generation=generation))
    assert not done.failures
    await engine.Resume(rollout_pb2.ResumeEngineRequest())
    probe = rollout_pb2.ScoreTokensRequest(
        run=RUN, sequences=[ids_bytes([5, 6, 7, 8])], temperature=1.0, probe=True
    )
    return await engine.Score(probe, timeout=5)


async def commit(stack, engine, generation, number):
    version = types_pb2.PolicyVersion(number=number)
    await engine.CommitVersion(
        rollout_pb2.CommitVersionRequest(run=RUN, generation=generation, version=version)
    )
    await stack.roster.find(lambda info: info.HasField("version") and info.version.number == number)


def fly(stack, group, count=12):
    """Turns long enough to be in flight, through the router."""
    requests = [turn(["Tell me"], group=group, sample=sample, max_new_tokens=200) for sample in range(count)]
    return [asyncio.create_task(stack.router.Turn(request, timeout=60)) for request in requests]


def columns(answer):
    return [np.frombuffer(data, "<i4").tolist() for data in (answer.rendered_ids, answer.sampled_ids)]


def check(trainer, answer):
    """Log-probabilities are those of each token's own version; the numbers in order of appearance."""
    prompt, sampled = columns(answer)
    numbers = np.frombuffer(answer.versions, "<i4")
    found = np.frombuffer(answer.logprobs, "<f4")
    assert len(numbers) == len(sampled) == len(found)
    for number in set(numbers.tolist()):
        mine = trainer.logprobs(number, prompt + sampled)[len(prompt) :]
        assert np.abs(found - mine)[numbers == number].max() < 1e-4
    seen = list(dict.fromkeys(numbers.tolist()))
    assert [version.number for version in answer.policy_versions] == seen
    return seen


async def test_turns_in_flight_go_on_and_each_token_has_its_version(stack, trainer):
    engine, info = await stack.engine()
    number, generation = info.version.number + 1, 10_000
    staged = trainer.stage(number)
    flying = fly(stack, 50)
    await asyncio.sleep(0.15)
    await publish(engine, staged, generation, number)
    late = asyncio.create_task(engine.Turn(turn(["Late"], group=51), timeout=30))
    await asyncio.wait(flying, timeout=0.6)
    assert not late.done(), "a turn began under weights that were not committed"
    withheld = sum(not task.done() for task in flying)
    await commit(stack, engine, generation, number)
    seen = [check(trainer, answer) for answer in await asyncio.gather(*flying)]
    assert withheld
    assert sum(numbers == [number - 1, number] for numbers in seen) == withheld
    assert check(trainer, await late) == [number]


async def test_a_failed_transfer_gives_up_what_it_stopped_and_it_is_repeated_whole(stack, trainer):
    engine, info = await stack.engine()
    number, generation = info.version.number + 1, 11_000
    staged = trainer.stage(number)
    flying = fly(stack, 60)
    await asyncio.sleep(0.15)
    direct = asyncio.create_task(engine.Turn(turn(["x"], group=61, max_new_tokens=200), timeout=2))
    await asyncio.sleep(0.05)
    await engine.Pause(rollout_pb2.PauseEngineRequest(mode=KEEP))
    await begin(engine, staged, generation, number)
    with pytest.raises(Corrupt):
        await load(engine, staged, generation, damage=True)
    with pytest.raises(NotReady):
        await asyncio.wait_for(direct, 5)
    await publish(engine, staged, generation + 1, number)
    await commit(stack, engine, generation + 1, number)
    assert all(check(trainer, a) in ([number - 1], [number]) for a in await asyncio.gather(*flying))


async def test_a_version_that_is_not_committed_is_never_answered(stack, trainer):
    """The probe failed: the bridge gives the turns up, and those that ended meanwhile are not answered."""
    engine, info = await stack.engine()
    number, generation = info.version.number + 1, 12_000
    staged = trainer.stage(number)
    flying = fly(stack, 70)
    await asyncio.sleep(0.15)
    await publish(engine, staged, generation, number, clear_cache=False)
    await asyncio.wait(flying, timeout=0.6)
    await engine.Pause(rollout_pb2.PauseEngineRequest(mode=ABORT))
    staged = trainer.stage(number + 1)
    await publish(engine, staged, generation + 1, number + 1, abort=True)
    await commit(stack, engine, generation + 1, number + 1)
    assert all(check(trainer, a) in ([number - 1], [number + 1]) for a in await asyncio.gather(*flying))
