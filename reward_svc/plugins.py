"""Verifiers that a user names by dotted path.

Invariant: only paths of the operator's own configuration are imported, never ones from data or a model.
"""

from __future__ import annotations

import importlib
from typing import Any

from services.runtime.errors import InvalidInput


def load(path: str) -> Any:
    """The callable at ``package.module:name``; raises InvalidInput."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidInput(
            f"Cannot import verifier {path!r}: {exc}",
            where="env.verifiers",
            do="Write it as package.module:name.",
        ) from exc
    if not callable(found):
        raise InvalidInput(f"Verifier {path!r} is not callable", where="env.verifiers")
    return found
