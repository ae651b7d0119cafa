"""Turns sampled ids into the message that people, tools and verifiers see.

Invariants
- Parsing never touches the ids; they stay what was sampled.
- A turn cut by length reports no tool calls: a parser may make a call out of half of one.
- The end-of-turn token and a stop string are no part of the content.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from protos.headrace.v1 import types_pb2
from rollout_svc.turns.messages import Chat
from rollout_svc.turns.render import Tokenizer


class Parsed(NamedTuple):
    """What a format parser found."""

    content: str
    reasoning: str
    tool_calls: list[types_pb2.ToolCall]


class FormatParser(Protocol):
    """Splits an answer's text into reasoning, content and tool calls."""

    def __call__(
        self, text: str, ids: Sequence[int], tools: Chat | None, template_kwargs: dict[str, Any]
    ) -> Parsed:
        """Parse one answer."""


class AnswerParser:
    """Parses answers for one tokenizer; ``parser`` is None for plain text."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop_ids: Collection[int], parser: FormatParser | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._parser = parser

    def parse(
        self,
        ids: Sequence[int],
        finish: types_pb2.FinishReason.ValueType,
        *,
        stop_string: str = "",
        stop_ids: Collection[int] = (),
        tools: Chat | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> types_pb2.Message:
        """The assistant's message for sampled ``ids``."""
        body = list(ids)
        if body and (body[-1] in self._stop_ids or body[-1] in stop_ids):
            body.pop()
        # Parsers look for special tokens in the text; readers must not see them.
        text = self._tokenizer.decode(body, skip_special_tokens=self._parser is None)
        if stop_string and stop_string in text:
            text = text[: text.rindex(stop_string)]
        message = types_pb2.Message(role="assistant", content=text)
        if self._parser is not None:
            parsed = self._parser(text, body, tools, template_kwargs or {})
            message.content, message.reasoning = parsed.content, parsed.reasoning
            if finish != types_pb2.FINISH_REASON_LENGTH:
                message.tool_calls.extend(parsed.tool_calls)
        return message
