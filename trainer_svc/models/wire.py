"""Log-probabilities under the weights as they travel to engines (wire dtype).

Invariant: the copy in the wire dtype is made from the master weights of this moment, and made again once
they changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from services.runtime.errors import InvalidInput
from trainer_svc.models.batching import TokenRows, plan_micro_batches
from trainer_svc.models.policy import Policy

MICRO_TOKENS = 16384


class WireScorer:
    """Scores sequences; with an FP32 wire it uses the masters themselves."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy = policy
        self._dtype = dtype
        self._copy: Policy | None = None

    def weights_changed(self) -> None:
        """Forget the copy."""
        self._copy = None

    @torch.no_grad()
    def score(self, sequences: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """log p of each token at ``temperature`` > 0, [S] float32 each; position 0 is 0."""
        if not temperature > 0:
            raise InvalidInput(f"temperature {temperature} is not above 0", where="Trainer.Score")
        if not sequences or min(len(each) for each in sequences) == 0:
            raise InvalidInput("There is no token to score", where="Trainer.Score")
        policy = self._wired()
        lengths = [len(each) for each in sequences]
        ids = torch.cat([each.long() for each in sequences])
        self._check_ids(ids)
        rows = TokenRows(torch.tensor(lengths), {"ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool)})
        for part in plan_micro_batches(lengths, range(len(lengths)), max_rows=1, max_tokens=MICRO_TOKENS):
            micro = rows.micro(part, policy.device)
            rows.scatter("logprobs", micro, policy(micro["ids"], micro["mask"], temperature).logprobs)
        return list(torch.split(rows.columns["logprobs"], lengths))

    def _wired(self) -> Policy:
        if self._dtype == torch.float32:
            return self._policy
        if self._copy is None:
            self._copy = copy.deepcopy(self._policy).requires_grad_(requires_grad=False)
            self._copy.autocast_dtype = None
            # Parameters only: buffers (rotary frequencies, correction biases) keep their own dtype.
            for parameter in self._copy.parameters():
                parameter.data = parameter.data.to(self._dtype)
        return self._copy

    def _check_ids(self, ids: Tensor) -> None:
        size = self._policy.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise InvalidInput(f"A token id is outside the vocabulary of {size}", where="Trainer.Score")
