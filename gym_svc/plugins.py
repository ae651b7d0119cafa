"""Objects that a user names by dotted path.

Invariants: only names from the operator's own configuration are imported, never from data or from the model;
an import that fails is the operator's error and is reported before any sample is claimed.
"""

from __future__ import annotations

import importlib
from typing import Any

from services.runtime.errors import InvalidInput


def is_path(name: str) -> bool:
    """Whether ``name`` is a dotted path (``package.module:name``) and not a registered name."""
    return ":" in name


def load(path: str, what: str) -> Any:
    """The object at ``package.module:name``; raises InvalidInput."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise InvalidInput(
            f"Cannot import {what} {path!r}: {exc}", where="env", do="Write it as package.module:name."
        ) from exc
    return found
