"""The model's tokenizer and the ids that end an answer; imports transformers, but neither torch nor vLLM.

Invariant: stop ids come from the tokenizer, the config and the generation_config and are sent with every
request; nothing else of the generation_config is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_svc.engine.policy import EnginePolicy
from services.runtime.errors import InvalidInput


def load_tokenizer(policy: EnginePolicy) -> Any:
    """The Hugging Face tokenizer; raises InvalidInput."""
    from transformers import AutoTokenizer

    check_model(policy.tokenizer, "policy.tokenizer.name")
    try:
        return AutoTokenizer.from_pretrained(policy.tokenizer)
    except (OSError, ValueError) as exc:
        raise InvalidInput(f"No tokenizer: {first_line(exc)}", where=policy.tokenizer) from exc


def stop_ids(tokenizer: Any, model: str) -> list[int]:
    """Every id that ends an answer of this model."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("config.json", "generation_config.json"):
        path = Path(model) / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def check_model(name: str, where: str) -> None:
    """Raise InvalidInput when ``name`` is a path and no directory is there."""
    # A name that looks like a path is one; anything else may be an id in the local Hugging Face cache.
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise InvalidInput(f"There is no model directory {name}", where=where)


def first_line(exc: Exception) -> str:
    """What an error says, in one line."""
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
