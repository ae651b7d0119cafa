"""Weights of the versions that the trainer trained away from.

Invariants
- At most ``window`` versions are held, those that the next step may still train on, and of one incarnation.
- They are copies in the wire dtype (what engines sampled with), in host memory: window * bytes on the wire.
- Scoring under one of them never touches the weights that train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from trainer_svc.models.policy import Policy, TokenScores
from trainer_svc.versions import Version

Scorer = Callable[[Tensor, Tensor, float], TokenScores]


class Snapshots:
    """The last versions of one policy."""

    def __init__(self, policy: Policy, dtype: torch.dtype, window: int) -> None:
        """``dtype`` of the wire; ``window`` is W."""
        self._policy = policy
        self._dtype = dtype
        self._window = window
        self._held: dict[Version, Mapping[str, Tensor]] = {}

    @property
    def versions(self) -> list[Version]:
        """What is held, oldest first."""
        return list(self._held)

    def keep(self, version: Version) -> None:
        """Copy the policy's weights, which are ``version`` and are about to change; drop what is too old."""
        last = version.number - self._window
        for each in self.versions:
            if each.incarnation != version.incarnation or not last < each.number < version.number:
                del self._held[each]
        self._held[version] = self._copy()

    def forget(self) -> None:
        """Drop all: a restore has begun another incarnation."""
        self._held.clear()

    def scorer(self, version: Version) -> Scorer:
        """The policy with the weights of ``version``, on its own device; gives no gradient."""
        weights = {name: tensor.to(self._policy.device) for name, tensor in self._held[version].items()}

        def score(ids: Tensor, wanted: Tensor, temperature: float) -> TokenScores:
            with torch.no_grad():
                found = functional_call(self._policy, dict(weights), (ids, wanted, temperature))
            return cast("TokenScores", found)

        return score

    def _copy(self) -> Mapping[str, Tensor]:
        # Persistent buffers (a router's correction bias) train too; they travel in their own dtype.
        parameters = dict(self._policy.named_parameters())
        persistent = self._policy.state_dict().keys()
        buffers = {name: each for name, each in self._policy.named_buffers() if name in persistent}
        wired = {name: _host_copy(each, self._dtype) for name, each in parameters.items()}
        return wired | {name: _host_copy(each, each.dtype) for name, each in buffers.items()}


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype, copy=True)
