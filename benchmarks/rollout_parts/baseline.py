"""vLLM without Headrace: ``python -m benchmarks.rollout_parts.baseline KIND JOB.json``.

KIND is ``async`` (AsyncLLM.generate, so many requests in flight) or ``llm`` (LLM().generate, all at once). A
process of its own, started in the environment of an engine's worker: same settings, same fork, and no gRPC.

It says ``{"ready": true}`` on its standard output, then answers each line ``{"limit": N}`` of its standard
input with the seconds and tokens of one pass of at most N new tokens per prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_svc.engine.arguments import engine_arguments
from rollout_svc.engine.policy import read_policy

Job = dict[str, Any]
Pass = Callable[[int], int]


def arguments(job: Job) -> dict[str, Any]:
    """What an engine of Headrace gives vLLM on a CPU."""
    policy = read_policy(job["policy_json"])
    return engine_arguments(
        policy, cpu=True, seed=1, kv_cache_mib=job["kv_cache_mib"], max_num_seqs=job["in_flight"]
    )


def parameters(job: Job, limit: int, index: int) -> Any:
    """Sampling as in a turn: log-probabilities of the sampled tokens, a seed of its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=limit,
        seed=index,
        stop_token_ids=job["stop_ids"],
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def serve(one_pass: Pass) -> None:
    """Answer passes until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        limit = int(json.loads(line)["limit"])
        started = time.perf_counter()
        tokens = one_pass(limit)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


def run_llm(job: Job) -> None:
    """vLLM's offline entry point."""
    from vllm import LLM

    llm = LLM(**arguments(job))

    def one_pass(limit: int) -> int:
        params = [parameters(job, limit, index) for index in range(len(job["prompts"]))]
        inputs = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(one_pass)


def run_async(job: Job) -> None:
    """vLLM's asynchronous engine, driven on this process's loop."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    config = AsyncEngineArgs(**arguments(job)).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    loop = asyncio.new_event_loop()
    numbers = itertools.count()

    async def start() -> Any:
        kind = Executor.get_class(config)
        return AsyncLLM(vllm_config=config, executor_class=kind, log_stats=False, log_requests=False)

    llm = loop.run_until_complete(start())

    async def one(ids: list[int], params: Any, places: asyncio.Semaphore) -> int:
        async with places:
            async for output in llm.generate({"prompt_token_ids": ids}, params, str(next(numbers))):
                last = output
        return len(last.outputs[0].token_ids)

    async def all_of_them(limit: int) -> int:
        places = asyncio.Semaphore(job["in_flight"])
        calls = [one(ids, parameters(job, limit, i), places) for i, ids in enumerate(job["prompts"])]
        return sum(await asyncio.gather(*calls))

    try:
        serve(lambda limit: loop.run_until_complete(all_of_them(limit)))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    _kind, _path = sys.argv[1:]
    _job = json.loads(Path(_path).read_text(encoding="utf-8"))
    {"async": run_async, "llm": run_llm}[_kind](_job)
