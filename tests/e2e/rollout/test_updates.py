"""Weights arrive through the engine's RPCs: fencing, failure, recovery, and nothing is served in between."""

from __future__ import annotations

import numpy as np
import pytest

from protos.headrace.v1 import rollout_pb2, types_pb2
from refit_bridge.sender import ShmSender, TensorSource
from services.runtime.errors import Corrupt, Fenced, NotReady, Refused
from tests.e2e.rollout.conftest import RUN, turn

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


@pytest.fixture
def staged(reference):
    """The reference model's weights, moved once, staged in shared memory."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    tensors = {k: v for k, v in reference.model.state_dict().items() if k != "lm_head.weight"}
    sender = ShmSender("e2e-rollout", chunk_bytes=60_000)
    yield sender.stage(0, 1, TensorSource(tensors), torch.float32)
    sender.close()


async def begin(engine, staged, generation, number):
    request = rollout_pb2.BeginUpdateRequest(
        run=RUN, generation=generation, version=types_pb2.PolicyVersion(number=number),
        transport="shm", plan_hash=staged.plan_hash,
    )  # fmt: skip
    if not (await engine.BeginUpdate(request)).plan_known:
        request.plan.extend(spec.to_proto() for spec in staged.plan)
        assert (await engine.BeginUpdate(request)).plan_known


async def load(engine, staged, generation, *, damage=False):
    for chunk in staged.chunks:
        request = rollout_pb2.LoadWeightsRequest(
            generation=generation, shm_name=staged.shm_name, slices=chunk
        )
        if damage:
            request.slices[0].checksum ^= 1
        await engine.LoadWeights(request)


async def difference(stack, reference):
    answer = await stack.router.Turn(turn(["Check"]))
    prompt, sampled = (np.frombuffer(d, "<i4").tolist() for d in (answer.rendered_ids, answer.sampled_ids))
    expected = np.array(reference(prompt + sampled)[len(prompt) :])
    return np.abs(np.frombuffer(answer.logprobs, "<f4") - expected).max(), answer


async def test_an_update_is_fenced_whole_and_recoverable(stack, reference, staged):
    engine = await stack.commit()
    assert (await difference(stack, reference))[0] > 1e-2  # the trainer moved, the engine did not
    with pytest.raises(Refused, match="not paused"):
        await begin(engine, staged, 5000, 1)
    pause = rollout_pb2.PauseEngineRequest(mode=rollout_pb2.PAUSE_MODE_WAIT, clear_cache=True)
    await engine.Pause(pause)
    await begin(engine, staged, 5001, 1)
    with pytest.raises(NotReady) as unserved:
        await engine.Turn(turn(["x"]), timeout=0.5)
    assert unserved.value.reason == "NO_VERSION"
    name = staged.chunks[0][0].name
    with pytest.raises(Corrupt, match=name):
        await load(engine, staged, 5001, damage=True)
    with pytest.raises(Refused, match="half an update"):
        await engine.Resume(rollout_pb2.ResumeEngineRequest())
    with pytest.raises(Fenced):
        await begin(engine, staged, 4000, 1)

    await engine.Pause(pause)
    await begin(engine, staged, 5002, 1)
    await load(engine, staged, 5002)
    done = await engine.FinishUpdate(rollout_pb2.FinishUpdateRequest(generation=5002))
    assert not done.failures
    assert done.checked >= len(staged.plan)  # the tied lm_head is checked, too
    await engine.Resume(rollout_pb2.ResumeEngineRequest())
    with pytest.raises(Refused, match=r"version 0\.1, not version 0\.2"):
        await engine.CommitVersion(commit(5002, 2))
    await engine.CommitVersion(commit(5002, 1))
    await stack.roster.find(lambda info: info.HasField("version") and info.version.number == 1)
    worst, answer = await difference(stack, reference)
    assert worst < 1e-4
    assert set(np.frombuffer(answer.versions, "<i4")) == {1}
    assert [v.number for v in answer.policy_versions] == [1]


def commit(generation, number):
    return rollout_pb2.CommitVersionRequest(
        run=RUN, generation=generation, version=types_pb2.PolicyVersion(number=number)
    )
