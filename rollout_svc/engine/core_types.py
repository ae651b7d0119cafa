"""What an :class:`~rollout_svc.engine.core.EngineCore` is asked for and answers; free of vLLM."""

from __future__ import annotations

from typing import Literal, NamedTuple

PauseMode = Literal["wait", "keep", "abort"]
ABORTED = "abort"


class LabelSpan(NamedTuple):
    """``length`` tokens in a row, sampled while the weights had this label."""

    label: str
    length: int


class Sampled(NamedTuple):
    """One generation; ``stop_string`` is empty unless a stop string ended it.

    ``finish`` is ``ABORTED`` when the engine gave it up: what was sampled until then is whole. ``labels``
    tile the ids; None when this vLLM does not say which weights sampled a token.
    """

    ids: list[int]
    logprobs: list[float]
    finish: str
    stop_string: str
    cached_tokens: int
    labels: list[LabelSpan] | None
