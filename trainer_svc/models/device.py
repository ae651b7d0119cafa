"""The device that a rank computes on."""

from __future__ import annotations

import torch


def prepare_device(local_rank: int, threads: int) -> torch.device:
    """CUDA device ``local_rank`` when there is one, else the CPU with ``threads`` threads."""
    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
