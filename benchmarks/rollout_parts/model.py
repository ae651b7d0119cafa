"""A Qwen3 of random weights and a word tokenizer: big enough that a step of 64 sequences takes some 20 ms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 2048
END = "<end>"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def build(folder: Path, *, hidden: int, layers: int, length: int) -> Path:
    """Save model and tokenizer below ``folder``; ``length`` is the longest sequence in tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=length,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def prompts(count: int, words: int) -> list[str]:
    """``count`` different prompts of ``words`` tokens each."""
    return [" ".join(f"w{1 + (31 * i + 7 * j) % (WORDS - 1)}" for j in range(words)) for i in range(count)]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [END, *(f"w{i}" for i in range(1, WORDS))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=END))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END, unk_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
