"""Arithmetic behind ``headrace plan``: how much memory, how much work in flight, how old.

Invariants: every figure carries the sum it comes from; what cannot be known before a start (activations,
a model that is not on this machine) is said to be unknown, never guessed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from services.recipe import Recipe

FLOAT32 = 4
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# A trajectory's columns: ids int32, logprobs float32, versions int32, mask uint8.
BYTES_PER_TOKEN = 4 + 4 + 4 + 1
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes with the sum they come from; ``bytes`` is None when it is unknown."""

    name: str
    bytes: int | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def parameters(model: Path) -> int | None:
    """Parameters of a local model by the headers of its safetensors files; None when it has none here."""
    files = sorted(model.glob("*.safetensors"))
    counts = [_in_header(file) for file in files]
    return sum(count for count in counts if count) if files and all(counts) else None


def _in_header(file: Path) -> int | None:
    """Elements of all tensors of one file; only its header is read."""
    with file.open("rb") as source:
        head = source.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= _HEADER_LIMIT:
            return None
        header = json.loads(source.read(size))
    return sum(int(prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")


def memory(recipe: Recipe) -> list[Figure]:
    """What the model takes, place by place."""
    count = parameters(Path(recipe.policy.model_name))
    wire = _BYTES[recipe.policy.generation.vllm_cfg.precision or recipe.policy.precision]
    found = [_times("trainer: master weights", count, FLOAT32, "FP32")]
    if recipe.policy.precision != "float32":
        width = _BYTES[recipe.policy.precision]
        found.append(_times(f"trainer: {recipe.policy.precision} copy in forward", count, width, "at most"))
    found.append(_times("trainer: gradients", count, FLOAT32, "FP32"))
    moments = 2 if "adam" in recipe.policy.optimizer.name.lower() else None
    if moments is None:
        found.append(Figure("trainer: optimizer", None, f"{recipe.policy.optimizer.name} is not known here"))
    else:
        found.append(_times("trainer: Adam's moments", count, moments * FLOAT32, "2 × FP32"))
    if recipe.loss_fn.reference_policy_kl_penalty:
        found.append(_times("trainer: reference policy", count, FLOAT32, "FP32"))
    ahead = steps_ahead(recipe)
    if recipe.kind == "grpo" and ahead and recipe.stack.rescore_samples != 0:
        found.append(
            _times("trainer: weights of older versions", count, ahead * FLOAT32, f"W = {ahead} × FP32")
        )
    found.append(Figure("trainer: activations", None, "grow with train_micro_batch_size × length"))
    if recipe.kind == "grpo":
        found += [
            _times("shared memory: weights on their way", count, wire, "one version, for a host's engines"),
            _times(
                "engine: weights", count, wire, f"each of {recipe.stack.engines}, before tensor parallelism"
            ),
            _cache(recipe),
        ]
    return found


def _times(name: str, count: int | None, width: int, text: str) -> Figure:
    if count is None:
        return Figure(name, None, f"parameters unknown: no safetensors here; × {width} bytes ({text})")
    return Figure(name, count * width, f"{count:,} parameters × {width} bytes ({text})")


def _cache(recipe: Recipe) -> Figure:
    if recipe.cluster.gpus_per_node:
        share = recipe.policy.generation.vllm_cfg.gpu_memory_utilization
        return Figure("engine: KV cache", None, f"up to {share:.0%} of its GPU, weights included")
    return Figure("engine: KV cache", 64 * 2**20, "each; HEADRACE_ENGINE_KV_CACHE_MIB, 64 by default")


def steps_ahead(recipe: Recipe) -> int:
    """W: train steps by which work may run ahead."""
    if recipe.kind == "sft":
        return recipe.stack.prefetch_steps
    rules = recipe.grpo.async_grpo
    return rules.max_trajectory_age_steps if rules.enabled else 0


def staleness(recipe: Recipe) -> dict[str, Any]:
    """How much is under way at most, and how old a trained token may be (in versions)."""
    ahead, rules = steps_ahead(recipe), recipe.grpo.async_grpo
    multiplier = recipe.grpo.batch_multiplier if recipe.kind == "grpo" else 1.0
    groups = int(recipe.prompts_per_step * (ahead + 1) * multiplier)
    samples = groups * recipe.generations_per_prompt
    tokens = samples * recipe.policy.max_total_sequence_length
    on_policy = recipe.kind == "sft"
    return {
        "steps_ahead": ahead,
        "open_groups_most": groups,
        "open_groups_why": f"{recipe.prompts_per_step} prompts × (W {ahead} + 1) × {multiplier:g}",
        "samples_in_flight_most": samples,
        "tokens_in_flight_most": tokens,
        "oldest_trained_token": 0 if on_policy else ahead,
        "publish": "nothing"
        if on_policy
        else "in flight"
        if ahead and rules.in_flight_weight_updates
        else "drained",
        "order": recipe.stack.order,
    }


def buffer_bytes(recipe: Recipe) -> Figure:
    """Upper bound of the payloads in Redis: what is open, and what waits for its checkpoint."""
    flight = staleness(recipe)
    period = recipe.checkpointing.save_period if recipe.checkpointing.enabled else recipe.max_steps
    kept = min(period, recipe.max_steps) * recipe.prompts_per_step * recipe.generations_per_prompt
    samples, length = flight["samples_in_flight_most"] + kept, recipe.policy.max_total_sequence_length
    return Figure(
        "redis: trajectories",
        samples * length * BYTES_PER_TOKEN,
        f"({flight['samples_in_flight_most']:,} in flight + {kept:,} until their checkpoint) × "
        f"{length:,} tokens × {BYTES_PER_TOKEN} bytes, if all had full length; records and rows come on top",
    )


def totals(recipe: Recipe, rows: int | None) -> dict[str, Any]:
    """Steps, samples, and passes over the data; None where the data are not here."""
    steps = recipe.max_steps
    if rows is not None and recipe.max_epochs is not None:
        steps = min(steps, recipe.max_epochs * rows // recipe.prompts_per_step)
    prompts = steps * recipe.prompts_per_step
    return {
        "steps": steps, "prompts": prompts, "samples": prompts * recipe.generations_per_prompt,
        "rows": rows, "epochs": prompts / rows if rows else None,
    }  # fmt: skip


def rows_of(path: str | None) -> int | None:
    """Rows of a local JSONL file."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def devices(recipe: Recipe) -> dict[str, Any]:
    """GPUs that the processes use: ranks, and engines times their parallelism; together in one device when
    there is one only."""
    cfg = recipe.policy.generation.vllm_cfg
    per_engine = cfg.tensor_parallel_size * cfg.pipeline_parallel_size
    have = recipe.cluster.gpus_per_node * recipe.cluster.num_nodes
    trainer, engines = recipe.stack.trainer_processes, recipe.stack.engines * per_engine
    return {
        "given": have,
        "trainer": trainer if have else 0,
        "engines": engines if have else 0,
        "shared": bool(have) and have < trainer + engines,
    }
