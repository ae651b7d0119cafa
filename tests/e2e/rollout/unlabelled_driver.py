"""One real vLLM that is told not to label its tokens, and an in-flight update under its turns.

Run as ``python -m tests.e2e.rollout.unlabelled_driver MODEL`` in the environment of an engine's worker; it
prints one JSON object. A process of its own: vLLM forks its core.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys

import numpy as np
import torch

from protos.headrace.v1 import rollout_pb2, types_pb2
from refit_bridge.sender import ShmSender, TensorSource
from rollout_svc.engine.launch import launch, warm
from rollout_svc.engine.policy import read_policy
from rollout_svc.engine.settings import EngineSettings
from rollout_svc.engine.turns import Turns
from rollout_svc.engine.updates import Updates
from rollout_svc.engine.versions import Versions

PROMPT = [5, 6, 7, 8, 9] * 4
RUN = "unlabelled"


class Rendering:
    """The prompt as it is."""

    async def rendered(self, request, prefix):
        return PROMPT

    async def message(self, request, ids, finish, stop_string):
        return types_pb2.Message(role="assistant")


def request(sample):
    params = types_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_new_tokens=120)
    key = types_pb2.SampleKey(run=RUN, book="train", group=0, sample=sample)
    return rollout_pb2.TurnRequest(key=key, run_seed=3, sampling=params)


def train(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


async def update(updates, staged, flying):
    await updates.pause(rollout_pb2.PauseEngineRequest(mode=rollout_pb2.PAUSE_MODE_KEEP))
    begin = rollout_pb2.BeginUpdateRequest(
        run=RUN, generation=1, version=types_pb2.PolicyVersion(number=1), transport="shm",
        plan_hash=staged.plan_hash, plan=[spec.to_proto() for spec in staged.plan],
    )  # fmt: skip
    await updates.begin(begin)
    for chunk in staged.chunks:
        await updates.load(
            rollout_pb2.LoadWeightsRequest(generation=1, shm_name=staged.shm_name, slices=chunk)
        )
    await updates.finish(1)
    await updates.resume()
    await asyncio.sleep(0.1)
    waiting = sum(not task.done() for task in flying)
    await updates.commit(rollout_pb2.CommitVersionRequest(run=RUN, generation=1, version=begin.version))
    return waiting


def worst(models, answer):
    """Largest |log-probability difference| of any token under its own version."""
    ids, numbers = (np.frombuffer(data, "<i4").tolist() for data in (answer.sampled_ids, answer.versions))
    found = np.frombuffer(answer.logprobs, "<f4")
    with torch.no_grad():
        rows = [m(torch.tensor([PROMPT + ids])).logits[0].float().log_softmax(-1) for m in models]
    start = len(PROMPT) - 1
    tokens = enumerate(zip(ids, numbers, found, strict=True))
    return max(abs(rows[n][start + i, t].item() - value) for i, (t, n, value) in tokens)


async def main(directory):
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    new = copy.deepcopy(old)
    policy = read_policy(json.dumps({"model_name": directory, "max_total_sequence_length": 256}))
    core = launch(policy, EngineSettings(kv_cache_mib=16), seed=1, stops=[1])
    core.labels_tokens = False
    sender = ShmSender("e2e-unlabelled", chunk_bytes=60_000)
    try:
        await core.init_transfer()
        versions = Versions(RUN)
        turns = Turns("e", core, Rendering(), versions)
        updates = Updates(core, versions, ("shm",), lambda: None, hold_seconds=60)
        versions.commit(RUN, 0, types_pb2.PolicyVersion())
        flying = [asyncio.create_task(turns.turn(request(sample))) for sample in range(8)]
        await asyncio.sleep(0.15)
        waiting = await update(updates, sender.stage(0, 1, TensorSource(train(new)), torch.float32), flying)
        answers = await asyncio.gather(*flying)
        spans = [[v.number for v in answer.policy_versions] for answer in answers]
        found = [float(worst([old, new], answer)) for answer in answers]
        print(
            "RESULT " + json.dumps({"waiting": waiting, "versions": spans, "worst": max(found)}), flush=True
        )
    finally:
        sender.close()
        core.shutdown()


if __name__ == "__main__":
    warm()
    asyncio.run(main(sys.argv[1]))
