"""Loading a Hugging Face causal LM and writing one.

Invariants
- Weights in memory are FP32 masters, whatever dtype the files have.
- A local path that does not exist is the user's mistake, said in one line; code from a model directory is
  never run (``trust_remote_code`` is off).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.runtime.errors import InvalidInput
from trainer_svc.models.policy import Policy

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": torch.float32,
}
# What a tokenizer and an engine read beside config and weights.
_SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def wire_dtype(name: str) -> torch.dtype:
    """The dtype in which weights travel to engines; raises InvalidInput for an unknown name."""
    if name not in DTYPES:
        raise InvalidInput(f"policy.generation.vllm_cfg.precision {name} is not known", where="recipe")
    return DTYPES[name]


def load_network(name: str, overrides: Mapping[str, Any], device: torch.device) -> Any:
    """The model at ``name`` (directory or Hugging Face id) in FP32 on ``device``, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_model(name)
    try:
        config = AutoConfig.from_pretrained(name, **dict(overrides))
        network = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as exc:
        raise InvalidInput(
            f"Cannot load the model: {_first_line(exc)}",
            where=f"policy.model_name {name}",
            do="Give a Hugging Face model directory.",
        ) from exc
    # Evaluation mode while training too: dropout would make the ratio of a policy to itself differ from 1.
    return network.eval().to(device)


def check_model(name: str) -> None:
    """Raise InvalidInput when ``name`` is a path without a model."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise InvalidInput("The model directory has no config.json", where=f"policy.model_name {name}")
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") != 1
    if not path.is_dir() and looks_local:
        raise InvalidInput("There is no such model directory", where=f"policy.model_name {name}")


def build_policy(network: Any, *, precision: str, chunk_tokens: int | None) -> Policy:
    """Wrap ``network``; on CUDA forward and backward run in ``precision``, on a CPU always in FP32."""
    policy = Policy(network, chunk_tokens=chunk_tokens)
    if precision != "float32" and policy.device.type == "cuda":
        policy.autocast_dtype = DTYPES[precision]
    return policy


def source_dtype(name: str) -> torch.dtype:
    """The dtype that the model's own config declares; FP32 when it declares none."""
    from transformers import AutoConfig

    declared = getattr(AutoConfig.from_pretrained(name), "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.float32


def write_network(network: Any, folder: Path, *, dtype: torch.dtype, model: str, tokenizer: str) -> None:
    """A Hugging Face directory that transformers and vLLM load: config, weights, tokenizer, templates."""
    former = network.config.dtype
    state = {name: value.detach().to("cpu", dtype) for name, value in network.state_dict().items()}
    try:
        network.config.dtype = dtype
        network.save_pretrained(folder, state_dict=state)
    finally:
        network.config.dtype = former
    copy_side_files(model, tokenizer, folder)


def copy_side_files(model: str, tokenizer: str, folder: Path) -> None:
    """Put the tokenizer's files, and the model's generation defaults, beside the weights in ``folder``."""
    for source in (Path(model).expanduser(), Path(tokenizer).expanduser()):
        for name in _SIDE_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    if not Path(tokenizer).expanduser().is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
