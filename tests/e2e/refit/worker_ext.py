"""The worker extension of these tests: takes a work-around away inside the engine, and gives it back."""

from __future__ import annotations

import os

from refit_bridge import faults
from refit_bridge.receiver import cpu_faults
from refit_bridge.receiver.extension import RefitExtension

_ORIGINALS = {
    "reset_expert_kernels": cpu_faults.reset_expert_kernels,
    "repack_tied_heads": cpu_faults.repack_tied_heads,
}


class ToggleExtension(RefitExtension):
    def headrace_test_workaround(self, name: str, present: bool) -> bool:
        setattr(cpu_faults, name, _ORIGINALS[name] if present else (lambda model: 0))
        return present

    def headrace_test_fault(self, fault: str) -> str:
        os.environ[faults.VARIABLE] = fault
        return fault
