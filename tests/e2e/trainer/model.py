"""A tiny Qwen3-shaped model with random weights, and a recipe for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_model(path: Path, *, tied: bool = True) -> Path:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return path


def recipe(model: Path, kind: str = "grpo", **policy: Any) -> str:
    return json.dumps(
        {
            "kind": kind,
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4},
            "sft": {"num_prompts_per_step": 16},
            "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
            "policy": {
                "model_name": str(model),
                "precision": "float32",
                "train_global_batch_size": 8,
                "train_micro_batch_size": 4,
                "max_total_sequence_length": 32,
                "optimizer": {"kwargs": {"lr": 0.003}},
                "scheduler": [
                    {
                        "name": "torch.optim.lr_scheduler.LinearLR",
                        "kwargs": {"start_factor": 0.1, "total_iters": 3},
                    },
                    {
                        "name": "torch.optim.lr_scheduler.ConstantLR",
                        "kwargs": {"factor": 1.0, "total_iters": 1000},
                    },
                    {"milestones": [3]},
                ],
                **policy,
            },
            "data": {"train": {"data_path": "rows.jsonl"}},
            "checkpointing": {"keep_top_k": 2},
        }
    )
