"""Messages of the contract as the dictionaries that chat templates read.

Invariant: absent parts stay absent; templates test for keys, and an empty ``tool_calls`` is not none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from protos.headrace.v1 import types_pb2
from services.runtime.errors import InvalidInput

Chat = list[dict[str, Any]]


def to_chat(messages: Iterable[types_pb2.Message]) -> Chat:
    """``messages`` for a chat template; tool arguments are parsed where they are JSON."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: types_pb2.Message) -> dict[str, Any]:
    if not message.role:
        raise InvalidInput("A message has no role", where="messages")
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_to_call(call) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if value := getattr(message, key):
            found[key] = value
    return found


def _to_call(call: types_pb2.ToolCall) -> dict[str, Any]:
    arguments: Any = call.arguments
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        # A policy writes broken JSON at times; its own text is what the template must show.
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def parse_tools(text: str) -> Chat | None:
    """Tool definitions as templates expect them (``{"type": "function", "function": …}``); None for none.

    The Responses form (name beside type) is brought to this form. Raises InvalidInput.
    """
    tools = _json(text, list, "tools_json")
    if not tools:
        return None
    return [_to_tool(tool) for tool in tools]


def _to_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidInput("A tool is no JSON object", where="tools_json")
    if "function" in tool or tool.get("type") != "function":
        return tool
    function = {
        key: value for key, value in tool.items() if key not in ("type", "strict") and value is not None
    }
    return {"type": "function", "function": function}


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Keywords for the chat template; raises InvalidInput."""
    found = _json(text, dict, "chat_template_kwargs_json")
    return dict(found or {})


def _json(text: str, kind: type, where: str) -> Any:
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise InvalidInput(f"No JSON: {exc}", where=where) from exc
    if not isinstance(found, kind):
        raise InvalidInput(f"Must be a JSON {'array' if kind is list else 'object'}", where=where)
    return found
