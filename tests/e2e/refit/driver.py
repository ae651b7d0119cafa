"""Drives one real vLLM engine through refits and prints one JSON object for each scenario.

Run as ``python -m tests.e2e.refit.driver KIND DIRECTORY [DTYPE]``; KIND is tied, untied, moe or bias. A
process of its own, because vLLM wants its environment before its import and forks its core.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip

import torch

torch.set_num_threads(1)

from refit_bridge.sender import HuggingFaceSource, ShmSender, TensorSource  # noqa: E402

PROMPT = [5, 6, 7, 8, 9] * 10


def build(kind: str, directory: str):
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )  # fmt: skip

    torch.manual_seed(0)
    common = {
        "vocab_size": 272, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "tied", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    experts = {
        "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip
    if kind == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))
    elif kind == "bias":
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    model.float().eval().save_pretrained(directory)
    return model


def register_model(kind: str) -> None:
    # Without it vLLM inspects the model in a subprocess of its own: 18 s on a cold cache.
    from vllm.model_executor.models.registry import ModelRegistry

    if kind == "moe":
        from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM as Model
    elif kind == "bias":
        from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM as Model
    else:
        from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as Model
    ModelRegistry.register_model(Model.__name__, Model)


def start_engine(kind: str, directory: str, dtype: str):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    register_model(kind)
    config = AsyncEngineArgs(
        model=directory, skip_tokenizer_init=True, dtype=dtype, max_model_len=128, enforce_eager=True,
        max_num_seqs=4, kv_cache_memory_bytes=16 << 20, block_size=32, disable_log_stats=True,
        weight_transfer_config={"backend": "headrace"},
        worker_extension_cls="tests.e2e.refit.worker_ext.ToggleExtension",
    ).create_engine_config()  # fmt: skip
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, log_requests=False
    )


class Bench:
    """One engine, one model that plays the trainer, one sender."""

    def __init__(self, kind: str, directory: str, dtype: str) -> None:
        self.model = build(kind, directory)
        self.engine = start_engine(kind, directory, dtype)
        self.wire = getattr(torch, dtype)
        self.sender = ShmSender(f"e2e-{kind}-{os.getpid()}", chunk_bytes=50_000)
        self.number = 0
        self.requests = 0

    def train(self, amount: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)

    async def refit(self, staged=None, *, edit=None, skip=()) -> dict:
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        self.number += 1
        if staged is None:
            staged = self.sender.stage(0, self.number, HuggingFaceSource(self.model), self.wire)
        specs = {spec.name: spec for spec in staged.plan}
        plan = [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in staged.plan]
        await self.engine.pause_generation(mode="wait", clear_cache=True)
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self.engine.collective_rpc("headrace_begin_update", args=(self.number, plan))
        await self.engine.start_weight_update()
        for chunk in staged.chunks:
            slices = [
                {
                    "name": s.name,
                    "dtype": specs[s.name].dtype,
                    "shape": list(specs[s.name].shape),
                    "offset": s.offset,
                    "nbytes": s.nbytes,
                    "checksum": s.checksum,
                }
                for s in chunk
                if s.name not in skip
            ]
            if edit:
                edit(slices)
            info = {"generation": self.number, "shm_name": staged.shm_name, "slices": slices}
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self.engine.finish_weight_update()
        (report,) = await self.engine.collective_rpc("headrace_refit_report")
        await self.engine.resume_generation()
        return report

    async def workaround(self, name: str, present: bool) -> None:
        await self.engine.collective_rpc("headrace_test_workaround", args=(name, present))

    async def difference(self) -> float:
        """Largest |log-probability difference| between the engine and the model over sampled tokens."""
        from vllm import SamplingParams

        self.requests += 1
        parameters = SamplingParams(
            max_tokens=16, temperature=1.0, logprobs=0, ignore_eos=True, seed=0, detokenize=False
        )
        prompt = {"prompt_token_ids": PROMPT}
        outputs = [o async for o in self.engine.generate(prompt, parameters, str(self.requests))]
        got = outputs[-1].outputs[0]
        ids = list(got.token_ids)
        with torch.no_grad():
            expected = self.model(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
        start = len(PROMPT) - 1
        return max(abs(expected[start + i, t].item() - got.logprobs[i][t].logprob) for i, t in enumerate(ids))


def tell(scenario: str, **facts) -> None:
    print("RESULT " + json.dumps({"scenario": scenario, **facts}), flush=True)


async def good(bench: Bench) -> None:
    tell("base", difference=await bench.difference())
    for step in ("first", "second"):
        bench.train()
        before = await bench.difference()
        report = await bench.refit()
        names = len(bench.sender.get(0, bench.number).plan)
        tell(step, before=before, difference=await bench.difference(), names=names, **report)
    bench.train(1e-6)
    report = await bench.refit()
    tell("small_step", difference=await bench.difference(), **report)


async def without(bench: Bench, name: str) -> None:
    await bench.workaround(name, False)
    bench.train(1e-3)
    report = await bench.refit()
    tell(f"without_{name}", difference=await bench.difference(), **report)
    await bench.workaround(name, True)
    tell(f"again_with_{name}", **await bench.refit(), difference=await bench.difference())


async def refused(bench: Bench) -> None:
    bench.train()
    error = await attempt(bench, edit=_damage)
    tell("corrupted", error=error)
    tell("after_corrupted", **await bench.refit(), difference=await bench.difference())
    bench.train()
    report = await bench.refit(skip=("model.layers.1.self_attn.k_proj.weight",))
    tell("missing_slice", **report)
    tensors = {named.name: named.tensor for named in HuggingFaceSource(bench.model)}
    del tensors["model.layers.0.mlp.down_proj.weight"]
    report = await bench.refit(bench.sender.stage(9, 1, TensorSource(tensors), torch.float32))
    tell("missing_in_plan", **report)
    tensors["model.nope.weight"] = torch.zeros(2)
    unknown = bench.sender.stage(9, 2, TensorSource(tensors), torch.float32)
    tell("unknown", error=await attempt(bench, unknown))
    tell("after_unknown", **await bench.refit(), difference=await bench.difference())


async def stale(bench: Bench) -> None:
    bench.train()
    await bench.engine.collective_rpc("headrace_test_fault", args=("stale:lm_head",))
    tell("stale_fault", **await bench.refit())
    await bench.engine.collective_rpc("headrace_test_fault", args=("",))
    tell("after_stale_fault", **await bench.refit(), difference=await bench.difference())


async def attempt(bench: Bench, staged=None, **kwargs) -> str:
    try:
        await bench.refit(staged, **kwargs)
    except Exception as exc:  # noqa: BLE001 (vLLM wraps what the worker raised in types of its own)
        return str(exc)
    return ""


def _damage(slices: list[dict]) -> None:
    for entry in slices:
        if entry["name"] == "model.layers.1.mlp.up_proj.weight":
            entry["checksum"] ^= 1


async def main(kind: str, directory: str, dtype: str = "float32") -> None:
    bench = Bench(kind, directory, dtype)
    try:
        await good(bench)
        if kind == "tied":
            await without(bench, "repack_tied_heads")
            await stale(bench)
        if kind == "moe":
            await without(bench, "reset_expert_kernels")
        if kind == "untied":
            await refused(bench)
            await stale(bench)
    finally:
        bench.sender.close()
        bench.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
