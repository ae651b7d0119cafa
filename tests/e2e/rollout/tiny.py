"""A tiny random Qwen3 with a byte-level tokenizer, made where it is needed."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
FORMAT = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in FORMAT])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder: Path, *, tied: bool = True) -> Path:
    """Save model, tokenizer and a generation_config that must not leak into sampling."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.15,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    leak = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 3.0, "max_new_tokens": 3}
    stops = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id]}
    (folder / "generation_config.json").write_text(json.dumps(leak | stops))
    return folder
