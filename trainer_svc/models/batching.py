"""Rows of different lengths as flat columns, and micro-batches cut from them.

Invariants
- Rows are padded on the right. A causal model never attends from a token to a later one, so padding cannot
  change a real token's result and needs no attention mask.
- Which rows share a micro-batch depends on lengths and budget alone: the same batch is always split alike.
Several sequences are not yet packed into one row; sorting by length keeps the padding small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class TokenRows:
    """Columns over all tokens of N rows, row after row: each is [total tokens]; ``lengths`` is [N]."""

    lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """N."""
        return int(self.lengths.shape[0])

    @property
    def starts(self) -> Tensor:
        """Where each row begins, [N]."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    def micro(self, rows: Tensor, device: torch.device) -> MicroBatch:
        """``rows`` (indices) padded to their longest, on ``device``; padding is 0."""
        lengths = self.lengths[rows]
        offsets = torch.arange(int(lengths.max()))
        valid = offsets[None, :] < lengths[:, None]
        index = (self.starts[rows][:, None] + offsets[None, :]).masked_fill(~valid, 0)
        padded = {name: flat[index].masked_fill(~valid, 0).to(device) for name, flat in self.columns.items()}
        return MicroBatch(rows, index, valid, padded)

    def scatter(self, name: str, micro: MicroBatch, values: Tensor) -> None:
        """Write ``values`` [B, S] of a micro-batch into column ``name``, made on first use (float32)."""
        total = int(self.lengths.sum())
        column = self.columns.setdefault(name, torch.zeros(total, dtype=torch.float32))
        column[micro.index[micro.valid]] = values.detach().float().cpu()[micro.valid]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded columns [B, S]; ``index`` and ``valid`` [B, S] say where each token came from."""

    rows: Tensor
    index: Tensor
    valid: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


def plan_micro_batches(
    lengths: Sequence[int], rows: Sequence[int], *, max_rows: int, max_tokens: int | None
) -> list[Tensor]:
    """Split ``rows``, longest first, into micro-batches of at most ``max_rows`` rows.

    With ``max_tokens`` a micro-batch instead takes as many rows as fit that many padded tokens, one at least.
    """
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    planned: list[list[int]] = []
    for row in order:
        if not planned or _full(planned[-1], lengths, max_rows, max_tokens):
            planned.append([])
        planned[-1].append(row)
    return [torch.tensor(part, dtype=torch.int64) for part in planned]


def _full(part: list[int], lengths: Sequence[int], max_rows: int, max_tokens: int | None) -> bool:
    if max_tokens is None:
        return len(part) >= max_rows
    return (len(part) + 1) * lengths[part[0]] > max_tokens
