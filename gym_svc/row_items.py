"""The ``input`` of a row as chat messages.

Invariants: text parts are joined without a separator; consecutive assistant items (message, function calls)
are one assistant message, as a chat template wants it; what cannot be represented is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.headrace.v1 import types_pb2
from services.runtime.errors import InvalidInput

ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(create: Mapping[str, Any], source: str) -> tuple[types_pb2.Message, ...]:
    """Messages of ``responses_create_params``: instructions first, then the input. Raises InvalidInput."""
    found: list[types_pb2.Message] = []
    instructions = create.get("instructions")
    if instructions:
        found.append(types_pb2.Message(role="system", content=str(instructions)))
    given = create.get("input")
    if isinstance(given, str):
        found.append(types_pb2.Message(role="user", content=given))
    elif isinstance(given, list) and given:
        for index, item in enumerate(given):
            _add(found, item, source, f"input[{index}]")
    else:
        raise _bad("input must be a string or a list that is not empty", source)
    return tuple(found)


def _add(found: list[types_pb2.Message], item: Any, source: str, at: str) -> None:
    if not isinstance(item, dict):
        raise _bad(f"{at} must be an object", source)
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(found, item, source, at)
    elif kind == "function_call":
        _assistant(found).tool_calls.append(_call(item, source, at))
    elif kind == "function_call_output":
        call_id, output = _text(item, "call_id", source, at), _text(item, "output", source, at)
        found.append(types_pb2.Message(role="tool", content=output, tool_call_id=call_id))
    elif kind == "reasoning":
        parts = item.get("summary") or []
        _assistant(found).reasoning += "".join(str(part.get("text", "")) for part in parts)
    else:
        raise _bad(f"{at} has type {kind!r}, which is not supported", source)


def _add_message(found: list[types_pb2.Message], item: Mapping[str, Any], source: str, at: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise _bad(f"{at}.role must be one of {', '.join(ROLES)}, not {role!r}", source)
    content = _content(item.get("content"), source, f"{at}.content")
    last = found[-1] if found else None
    if role == "assistant" and last is not None and last.role == "assistant" and not last.content:
        last.content = content
    else:
        # Chat templates know "system"; "developer" is the Responses name of the same thing.
        found.append(types_pb2.Message(role="system" if role == "developer" else role, content=content))


def _content(value: Any, source: str, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad(f"{at} must be a string or a list of parts", source)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _bad(f"{at} has a part of type {kind!r}; only input_text is supported", source)
        texts.append(_text(part, "text", source, at))
    return "".join(texts)


def _assistant(found: list[types_pb2.Message]) -> types_pb2.Message:
    if not found or found[-1].role != "assistant":
        found.append(types_pb2.Message(role="assistant"))
    return found[-1]


def _call(item: Mapping[str, Any], source: str, at: str) -> types_pb2.ToolCall:
    fields = {key: _text(item, key, source, at) for key in ("call_id", "name", "arguments")}
    return types_pb2.ToolCall(id=fields["call_id"], name=fields["name"], arguments=fields["arguments"])


def _text(item: Mapping[str, Any], key: str, source: str, at: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(f"{at}.{key} must be a string", source)
    return value


def _bad(text: str, source: str) -> InvalidInput:
    return InvalidInput(
        f"Bad row: responses_create_params.{text}", where=source, do="Correct the row in the data file."
    )
