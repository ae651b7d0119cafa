"""Fault hook for chaos tests: damages weight transfers on purpose.

``HEADRACE_FAULT_REFIT`` holds one or more faults, separated by commas:

- ``corrupt:TENSOR``: the trainer changes bytes of the staged tensor after its checksum was taken.
- ``omit:TENSOR``: the trainer leaves the tensor out of what it stages.
- ``stale:MODULE``: the engine keeps the old weights of a module (``lm_head``, ``model.norm``) although new
  ones arrived.

``@N`` behind a fault limits it to version number N (``corrupt:lm_head.weight@2``).

Invariants: the environment is read here and nowhere else; without the variable nothing is done; every use
is logged as a warning. (The name avoids the prefix of the bridge's own settings.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from services.runtime.errors import InvalidInput
from services.runtime.logs import get_logger

VARIABLE = "HEADRACE_FAULT_REFIT"
KINDS = ("corrupt", "omit", "stale")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what is done to which tensor, at which version number (None: at all)."""

    kind: str
    tensor: str
    number: int | None = None


def active(kind: str, number: int) -> list[str]:
    """Tensors (or modules) that suffer ``kind`` at this version number; logs loudly when there are any."""
    hit = [fault.tensor for fault in configured() if fault.kind == kind and fault.number in (None, number)]
    if hit:
        get_logger("refit.faults").warning(
            "FAULT INJECTED into the weight transfer",
            kind=kind,
            tensors=hit,
            version=number,
            variable=VARIABLE,
        )
    return hit


def configured() -> list[Fault]:
    """The faults of the environment; raises InvalidInput for one that cannot be read."""
    return [_parse(text.strip()) for text in os.environ.get(VARIABLE, "").split(",") if text.strip()]


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    tensor, _, number = rest.partition("@")
    if kind not in KINDS or not tensor or (number and not number.isdigit()):
        raise InvalidInput(
            f"{text!r} is not a fault",
            where=VARIABLE,
            do="Write corrupt:TENSOR, omit:TENSOR or stale:MODULE.",
        )
    return Fault(kind, tensor, int(number) if number else None)
