"""vLLM's AsyncLLM behind the few operations that Headrace needs; the only place that calls it.

Invariants
- Differences between the vLLM versions are met here and in :mod:`rollout_svc.engine.launch`.
- Log-probabilities are those of the sampling distribution (logprobs_mode processed_logprobs).
- What vLLM refuses is InvalidInput; a dead or aborting engine is NotReady, since a turn may be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_svc.engine.arguments import PROBE_SLOTS
from rollout_svc.engine.core_types import ABORTED, LabelSpan, PauseMode, Sampled
from rollout_svc.turns.sampling import Sampling
from services.runtime.errors import Internal, InvalidInput, NotReady, Unsupported

SCORE_ELEMENTS = 32_000_000
"""Largest sequence × vocabulary that a Score at another temperature than 1 may take (256 MB of floats)."""


class EngineCore:
    """Owns one AsyncLLM."""

    def __init__(self, llm: Any, *, stop_ids: Sequence[int]) -> None:
        self._llm = llm
        self._stop_ids = list(stop_ids)
        self._numbers = itertools.count()
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocabulary: int = llm.model_config.get_vocab_size()
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.device = str(llm.vllm_config.device_config.device_type)
        slots: int = llm.vllm_config.scheduler_config.max_num_seqs
        self.turns_at_once = max(1, slots - PROBE_SLOTS)
        self.has_images = bool(llm.model_config.is_multimodal_model)
        # Since 0.3x; an older vLLM changes weights without a trace in its outputs.
        self.labels_tokens = hasattr(llm, "update_weight_version")

    @property
    def dead(self) -> bool:
        """Whether vLLM's own process has gone; final for this object."""
        return bool(self._llm.errored)

    async def sample(self, ids: Sequence[int], sampling: Sampling, *, seed: int, salt: str) -> Sampled:
        """Continue ``ids`` until a stop or a limit."""
        self.check_prompt(ids)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop=list(sampling.stop) or None,
            stop_token_ids=[*self._stop_ids, *sampling.stop_token_ids],
            bad_words=list(sampling.bad_words) or None,
            logprobs=0,
            flat_logprobs=True,
            # Text is needed inside vLLM only to find stop strings.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._generate({"prompt_token_ids": list(ids), "cache_salt": salt}, params)
        return _sampled(output, labelled=self.labels_tokens)

    async def score(
        self, ids: Sequence[int], temperature: float, *, salt: str, urgent: bool = False
    ) -> NDArray[np.float32]:
        """log_softmax(logits / temperature) of each id given those before it; 0 for the first.

        ``urgent``: before everything that waits.
        """
        self.check_prompt(ids)
        plain = temperature == 1.0
        if not plain and len(ids) * self.vocabulary > SCORE_ELEMENTS:
            # vLLM's prompt log-probabilities ignore the temperature, so another one needs them all.
            raise Unsupported(
                f"Scoring {len(ids)} tokens at temperature {temperature:g} with this vocabulary is too large",
                where="temperature",
                do="Score at temperature 1, or shorter sequences.",
            )
        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0 if plain else -1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._generate({"prompt_token_ids": list(ids), "cache_salt": salt}, params, urgent)
        if output.outputs[0].finish_reason == ABORTED:
            raise _given_up()
        return _at_temperature(output.prompt_logprobs, len(ids), temperature)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise InvalidInput unless ``ids`` leave room for one token and are in the vocabulary."""
        if not ids:
            raise InvalidInput("The prompt is empty", where="messages")
        if len(ids) >= self.max_model_len:
            raise InvalidInput(
                f"The prompt has {len(ids)} tokens; the engine takes {self.max_model_len} with the answer",
                where="prompt",
                do="End the episode as truncated, or raise max_model_len.",
                reason="PROMPT_TOO_LONG",
            )
        if max(ids) >= self.vocabulary:
            raise InvalidInput(
                f"Token id {max(ids)} is outside the vocabulary of {self.vocabulary}", where="prompt"
            )

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """vLLM's pause; returns when nothing runs (``keep``: when nothing moves)."""
        async with self._errors():
            await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Schedule again."""
        async with self._errors():
            await self._llm.resume_generation()

    async def init_transfer(self) -> None:
        """Once, after the start."""
        async with self._errors():
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    async def label(self, label: str) -> None:
        """Give the present weights a label; tokens sampled from here on carry it."""
        if self.labels_tokens:
            async with self._errors():
                await self._llm.update_weight_version(label)

    async def start_update(self, generation: int, plan: list[dict[str, Any]]) -> None:
        """Hand the plan to the receiver in each worker, then enter vLLM's update."""
        async with self._errors():
            await self._llm.collective_rpc("headrace_begin_update", args=(generation, plan))
            await self._llm.start_weight_update()

    async def update(self, info: dict[str, Any]) -> None:
        """One chunk of weights."""
        async with self._errors():
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, label: str) -> list[dict[str, Any]]:
        """Leave vLLM's update; the receiver's report of each worker. The new weights get ``label``."""
        async with self._errors():
            await self._llm.finish_weight_update()
            await self.label(label)
            reports = await self._llm.collective_rpc("headrace_refit_report")
        return list(reports)

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()

    async def _generate(self, prompt: dict[str, Any], params: SamplingParams, urgent: bool = False) -> Any:
        output: Any = None
        async with self._errors():
            # The lower number goes first.
            name, priority = f"h{next(self._numbers)}", -int(urgent)
            async for part in self._llm.generate(prompt, params, name, priority=priority):
                output = part
        if output is None or output.outputs[0].finish_reason in (None, "error"):
            raise _given_up()
        return output

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except EngineDeadError as exc:
            raise NotReady(
                "vLLM's engine process has died", do="Repeat the call.", reason="ENGINE_DEAD"
            ) from exc
        except ValueError as exc:  # VLLMValidationError is one
            raise InvalidInput(f"vLLM refuses: {exc}") from exc
        except Exception as exc:
            if self.dead:
                raise NotReady("vLLM's engine process has died", reason="ENGINE_DEAD") from exc
            raise Internal(f"vLLM failed: {exc}") from exc


def _given_up() -> NotReady:
    return NotReady("The engine gave the request up", do="Repeat it.", reason="ABORTED")


def _sampled(output: Any, *, labelled: bool) -> Sampled:
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    logprobs = list(answer.logprobs.logprobs) if answer.logprobs is not None else []
    if len(ids) != len(logprobs):
        raise Internal(f"vLLM returned {len(logprobs)} log-probabilities for {len(ids)} tokens")
    stop_string = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
    labels = _labels(answer, len(ids)) if labelled else None
    cached = output.num_cached_tokens or 0
    return Sampled(ids, logprobs, answer.finish_reason, stop_string, cached, labels)


def _labels(answer: Any, length: int) -> list[LabelSpan]:
    spans = [(str(span.version), span.start, span.end) for span in answer.weight_versions or ()]
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != length:
        raise Internal(f"vLLM's weight versions {spans} do not cover {length} tokens")
    return [LabelSpan(label, end - start) for label, start, end in spans if end > start]


def _at_temperature(flat: Any, length: int, temperature: float) -> NDArray[np.float32]:
    """``flat`` has for each position but the first: the token itself, then (maybe) the whole vocabulary."""
    found = np.zeros(length, np.float32)
    if length == 1:
        return found
    rows = np.asarray(flat.logprobs, np.float64).reshape(length - 1, -1)
    own, others = rows[:, 0] / temperature, rows[:, 1:] / temperature
    if temperature == 1.0:
        found[1:] = own
        return found
    # Log-probabilities are logits up to a constant per position, which log_softmax removes.
    peak = others.max(axis=1)
    found[1:] = own - peak - np.log(np.exp(others - peak[:, None]).sum(axis=1))
    return found
