"""The part of the recipe's policy section that an engine reads.

Invariant: the recipe was validated where it was loaded; here only what the engine needs is read, and a
missing or mistyped part is one clear InvalidInput.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True)
class EnginePolicy:
    """What the engine needs to know of the policy."""

    model: str
    tokenizer: str
    precision: str | None
    max_total_sequence_length: int | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    tool_parser: str | None
    reasoning_parser: str | None
    vllm_cfg: dict[str, Any] = field(default_factory=dict)
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)


def read_policy(policy_json: str) -> EnginePolicy:
    """The engine's part of ``policy_json``; raises InvalidInput or Unsupported."""
    policy = _load(policy_json)
    tokenizer, generation = _section(policy, "tokenizer"), _section(policy, "generation")
    cfg, kwargs = _section(generation, "vllm_cfg"), dict(_section(generation, "vllm_kwargs"))
    if cfg.get("logprobs_mode") not in (None, "processed_logprobs"):
        raise Unsupported(
            "Only processed_logprobs are log-probabilities of the sampling distribution",
            where="policy.generation.vllm_cfg.logprobs_mode",
            do="Remove the key.",
        )
    chat = _section(cfg, "http_server_serving_chat_kwargs")
    model = str(policy.get("model_name") or "")
    if not model:
        raise InvalidInput("The policy names no model", where="policy.model_name")
    return EnginePolicy(
        model=model,
        tokenizer=str(tokenizer.get("name") or model),
        precision=policy.get("precision"),
        max_total_sequence_length=policy.get("max_total_sequence_length"),
        chat_template=_template(tokenizer.get("chat_template")),
        chat_template_kwargs=dict(tokenizer.get("chat_template_kwargs") or {}),
        tool_parser=kwargs.pop("tool_parser", None) or chat.get("tool_parser"),
        reasoning_parser=kwargs.pop("reasoning_parser", None) or chat.get("reasoning_parser"),
        vllm_cfg=cfg,
        vllm_kwargs=kwargs,
        hf_config_overrides=dict(policy.get("hf_config_overrides") or {}),
    )


def _load(policy_json: str) -> dict[str, Any]:
    try:
        policy = json.loads(policy_json)
    except ValueError as exc:
        raise InvalidInput(f"policy_json is no JSON: {exc}", where="policy_json") from exc
    if not isinstance(policy, dict):
        raise InvalidInput("policy_json is no JSON object", where="policy_json")
    return policy


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    found = parent.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidInput(f"{name} is no mapping", where=f"policy: {name}")
    return found


def _template(value: str | None) -> str | None:
    """A template given as a path or as itself."""
    if not value or "{" in value or "\n" in value:
        return value or None
    path = Path(value).expanduser()
    if not path.is_file():
        raise InvalidInput(
            f"There is no chat template {value}", where="policy.tokenizer.chat_template", do="Give a file."
        )
    return path.read_text(encoding="utf-8")
