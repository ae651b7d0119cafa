"""What a chaos run trains on: a random tiny model that speaks in digits, and rows that reward even numbers.

About a third of the random answers are right, so that every batch has a gradient from the first step on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
LETTERS = [*"0123456789+-="]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
EVEN = [str(number) for number in range(0, 100, 2)]
PROMPTS, SAMPLES, STEPS, SAVE_PERIOD = 8, 4, 12, 4


def make_model(folder: Path) -> Path:
    """A Hugging Face directory of a Qwen3 with about 0.1 million random parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *LETTERS]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_rows(path: Path, count: int) -> Path:
    """``count`` rows whose every even number of up to two digits is right."""
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{number}+{number % 7}="}]},
            "expected_answer": EVEN,
            "verifier": "exact_answer",
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_recipe(folder: Path, **stack: Any) -> Path:
    """A run of STEPS steps on the model and rows of ``folder``; ``stack`` overrides the stack section."""
    recipe = {
        "kind": "grpo",
        "name": "chaos",
        "stack": {
            "threads": {"engine": 1, "trainer": 1},
            "probe_tolerance": 1.0e-3,
            "claim_timeout_s": 3,
            **stack,
        },
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": SAMPLES,
            "max_num_steps": STEPS,
            "val_at_start": True,
            "val_period": 6,
            "val_at_end": True,
            "seed": 3,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
        "policy": {
            "model_name": str(folder / "model"),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "train_global_batch_size": PROMPTS * SAMPLES,
            "train_micro_batch_size": 16,
            "max_grad_norm": 1.0,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2.0e-3}},
            "scheduler": [
                {
                    "name": "torch.optim.lr_scheduler.LinearLR",
                    "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": STEPS},
                }
            ],
            "generation": {
                "max_new_tokens": 3,
                "temperature": 1.0,
                "val_temperature": 0.0,
                "vllm_cfg": {"gpu_memory_utilization": 0.1, "enforce_eager": True},
            },
        },
        "data": {
            "train": {"data_path": str(folder / "train.jsonl")},
            "validation": {"data_path": str(folder / "validation.jsonl")},
            "shuffle": True,
        },
        "checkpointing": {"save_period": SAVE_PERIOD, "keep_top_k": 2},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def make_world(folder: Path) -> Path:
    """Model, rows and recipe; returns the recipe."""
    make_model(folder / "model")
    make_rows(folder / "train.jsonl", 60)
    make_rows(folder / "validation.jsonl", 20)
    return make_recipe(folder)
