"""Log-probabilities of a Hugging Face causal LM, at the sampling temperature.

Invariants
- Position t holds log p(token t | tokens before t) / temperature-scaled; position 0 is 0.
- The head runs on wanted positions only, in chunks: logits of the whole batch over the whole vocabulary
  never exist in FP32 at once. With several chunks the backward pass recomputes them.
- Softmax is FP32 whatever the precision of the network.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# 64 MiB of FP32 logits.
CHUNK_ELEMENTS = 1 << 24
# Heads that change logits after the projection: they are run as a whole, by the model itself.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


class TokenScores(NamedTuple):
    """``logprobs`` [B, S] with gradient, 0 where not wanted; ``correct`` [B, S] bool: the likeliest token."""

    logprobs: Tensor
    correct: Tensor


class Policy(nn.Module):
    """A causal LM that answers with log-probabilities of given tokens."""

    def __init__(self, network: Any, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.network = network
        self.autocast_dtype: torch.dtype | None = None
        text = network.config.get_text_config()
        self._whole_head = any(getattr(text, name, None) not in (None, 1, 1.0) for name in _LOGIT_TRANSFORMS)
        # Ids that the model knows: 0 .. vocab_size - 1.
        self.vocab_size = int(text.vocab_size)
        self._chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // self.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, wanted: Tensor, temperature: float) -> TokenScores:
        """Scores of ``ids`` [B, S] int64 at the positions of ``wanted`` [B, S] bool."""
        wanted = wanted.clone()
        wanted[:, 0] = False
        with self._autocast():
            states = self._states(ids)[:, :-1][wanted[:, 1:]]
        found = [
            self._score(states[at : at + self._chunk], ids[wanted][at : at + self._chunk], temperature)
            for at in range(0, states.shape[0], self._chunk)
        ]
        return _spread(found, wanted)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def _states(self, ids: Tensor) -> Tensor:
        """Last hidden states [B, S, H], or logits [B, S, V] where the model's head must run as a whole."""
        if self._whole_head:
            return self.network(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]
        body = self.network.base_model
        return body(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _score(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and states.shape[0] == self._chunk:
            found: tuple[Tensor, Tensor] = checkpoint(
                self._head, states, targets, temperature, use_reentrant=False
            )
            return found
        return self._head(states, targets, temperature)

    def _head(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        with self._autocast():
            logits = states if self._whole_head else self.network.get_output_embeddings()(states)
        scaled = logits.float() / temperature
        logprobs = -functional.cross_entropy(scaled, targets, reduction="none")
        return logprobs, scaled.detach().argmax(dim=-1) == targets


def _spread(found: list[tuple[Tensor, Tensor]], wanted: Tensor) -> TokenScores:
    """Chunks of [wanted tokens] back at their places in [B, S]."""
    logprobs = torch.zeros(wanted.shape, dtype=torch.float32, device=wanted.device)
    correct = torch.zeros_like(wanted)
    if found:
        logprobs = logprobs.masked_scatter(wanted, torch.cat([part[0] for part in found]))
        correct = correct.masked_scatter(wanted, torch.cat([part[1] for part in found]))
    return TokenScores(logprobs, correct)
