"""Fixed inputs and tolerances of the image check.

Invariants: the same size gives the same rows in every process; tolerances depend on the weight's type only.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_ROWS = 32
RANDOM_ROWS = 8
_SEED = 20260101

# Relative error of one weight read back through a unit vector: a product with 1 and sums with 0 are exact,
# so this only allows for kernels that convert.
EXACT = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float64: 1e-12}
# Error of a row's product with standard normal input, in units of the row's norm: rounding of the output.
ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-10}
# The same for an expert (three products and an activation), in units of the answer's root mean square.
EXPERT = {torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-9}


def probe_rows(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unit vectors, then random rows: x [rows, width], and the columns [units] that the unit vectors pick."""
    generator = torch.Generator().manual_seed(_SEED + width)
    columns = torch.randperm(width, generator=generator)[:UNIT_ROWS]
    units = torch.zeros(len(columns), width)
    units[torch.arange(len(columns)), columns] = 1.0
    rows = torch.cat([units, torch.randn(RANDOM_ROWS, width, generator=generator)])
    return rows.to(device=device, dtype=dtype), columns.to(device)


def random_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed standard normal rows [rows, width]."""
    generator = torch.Generator().manual_seed(_SEED - width)
    return torch.randn(rows, width, generator=generator).to(device=device, dtype=dtype)
