"""vLLM's tool and reasoning parsers as one :class:`~rollout_svc.turns.parse.FormatParser`.

Invariants: an unknown parser is refused at Setup with the nearest known one; a parser that fails on what a
policy wrote yields plain content and a log line, since broken output is the policy's and not a failure.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from protos.headrace.v1 import types_pb2
from rollout_svc.turns.messages import Chat
from rollout_svc.turns.parse import FormatParser, Parsed
from services.runtime.errors import InvalidInput
from services.runtime.logs import get_logger


def make_parser(tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> FormatParser | None:
    """The parser for these names; None when both are None. Raises InvalidInput."""
    if tool_parser is None and reasoning_parser is None:
        return None
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools = _find(ToolParserManager.get_tool_parser, ToolParserManager, tool_parser, "tool_parser")
    reasoning = _find(
        ReasoningParserManager.get_reasoning_parser,
        ReasoningParserManager,
        reasoning_parser,
        "reasoning_parser",
    )
    return VllmParser(tokenizer, tools, reasoning)


class VllmParser:
    """Reasoning first, then tool calls in what remains, as vLLM's own chat server does."""

    def __init__(self, tokenizer: Any, tool_parser: Any, reasoning_parser: Any) -> None:
        self._tokenizer = tokenizer
        self._tools = tool_parser
        self._reasoning = reasoning_parser
        self._log = get_logger("engine")

    def __call__(
        self, text: str, ids: Sequence[int], tools: Chat | None, template_kwargs: dict[str, Any]
    ) -> Parsed:
        """Parse one answer."""
        # Parsers are vLLM's and models write anything: whatever one raises is about the answer's form.
        try:
            return self._parse(text, tools, template_kwargs)
        except Exception as exc:  # noqa: BLE001
            self._log.warning("answer not parsed", error=f"{type(exc).__name__}: {exc}")
            return Parsed(text, "", [])

    def _parse(self, text: str, tools: Chat | None, template_kwargs: dict[str, Any]) -> Parsed:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=tools,
            tool_choice="auto" if tools else "none",
        )
        reasoning, content = "", text
        if self._reasoning is not None:
            parser = self._reasoning(self._tokenizer, chat_template_kwargs=template_kwargs)
            found, rest = parser.extract_reasoning(text, request)
            reasoning, content = found or "", rest or ""
        if self._tools is None or not tools:
            return Parsed(content, reasoning, [])
        called = self._tools(self._tokenizer, request.tools).extract_tool_calls(content, request)
        if not called.tools_called:
            return Parsed(content, reasoning, [])
        return Parsed(called.content or "", reasoning, _calls(called.tool_calls))


def _calls(found: Any) -> list[types_pb2.ToolCall]:
    return [types_pb2.ToolCall(name=call.function.name, arguments=call.function.arguments) for call in found]


def _find(get: Any, manager: Any, name: str | None, where: str) -> Any:
    if name is None:
        return None
    try:
        return get(name)
    except (KeyError, ImportError) as exc:
        known = list(manager.list_registered()) if hasattr(manager, "list_registered") else []
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise InvalidInput(
            f"vLLM has no {where} {name!r}",
            where=f"policy.generation.vllm_kwargs.{where}",
            do=f"Did you mean {near[0]}?" if near else "",
        ) from exc
