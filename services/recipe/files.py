"""The files that a recipe names: are they there, and how another process finds them.

Invariant: nothing is downloaded. A model is a local directory, or is in the local Hugging Face cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from services.recipe.errors import BadKeyError
from services.recipe.root import Recipe

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATHS = (
    "policy.model_name", "policy.tokenizer.name", "data.train.data_path", "data.validation.data_path",
    "checkpointing.checkpoint_dir", "checkpointing.export_dir", "logger.log_dir",
)  # fmt: skip


def check_files(recipe: Recipe) -> None:
    """Raise :class:`BadKeyError` when the model, the tokenizer or a data file is missing."""
    _check_model("policy.model_name", recipe.policy.model_name, needs="config.json")
    if recipe.policy.tokenizer.name is not None:
        _check_model("policy.tokenizer.name", recipe.policy.tokenizer.name, needs="tokenizer_config.json")
    for key, source in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if source is not None and not Path(source.data_path).is_file():
            raise BadKeyError(
                f"{key}.data_path",
                f"there is no file {source.data_path}",
                do="Paths start at the working directory.",
            )


def anchored(recipe: Recipe) -> Recipe:
    """``recipe`` with absolute paths, so that it means the same to a process that works elsewhere."""
    tree = recipe.model_dump(mode="json")
    for key in _PATHS:
        *path, word = key.split(".")
        section: Any = tree
        for part in path:
            section = (section or {}).get(part)
        value = section.get(word) if section else None
        if value and (word not in ("model_name", "name") or Path(value).expanduser().exists()):
            section[word] = str(Path(value).expanduser().absolute())
    return Recipe.model_validate(tree)


def _check_model(key: str, name: str, *, needs: str) -> None:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / needs).is_file():
            raise BadKeyError(key, f"{name} has no {needs}", do="Give a Hugging Face model directory.")
        return
    if _HUB_ID.fullmatch(name) and not path.parent.is_dir():
        if not _cached(name):
            raise BadKeyError(
                key,
                f"{name} is neither a directory nor in the Hugging Face cache",
                do=f"Run `hf download {name}`.",
            )
        return
    raise BadKeyError(key, f"there is no model at {name}", do="Paths start at the working directory.")


def _cached(name: str) -> bool:
    root = os.environ.get("HF_HUB_CACHE") or Path(
        os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser(), "hub"
    )
    return any(Path(root).glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
