"""One row of a Gym JSONL file as messages, tools and parameters.

Invariants
- A row is refused as a whole, with its source ("train.jsonl:17") in the error; nothing is guessed.
- ``Row.fields`` is the row as it stands in the file: verifiers see what the author wrote.
- Rows are shared between the samples of a group: nobody modifies them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gym_svc.row_items import messages_of
from protos.headrace.v1 import types_pb2
from services.runtime.errors import InvalidInput

CACHED_ROWS = 512
# OpenAI's Responses create parameters; anything else belongs in metadata.extra_body.
KNOWN_PARAMS = frozenset({
    "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "model", "parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store",
    "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A parsed row.

    ``messages`` is the conversation that the prompt consists of, ``tools_json`` the row's tool definitions
    (empty for none), ``tool_names`` what the policy may call, ``params`` the remaining create parameters with
    ``extra_body`` decoded.
    """

    source: str
    json: str
    fields: Mapping[str, Any]
    messages: tuple[types_pb2.Message, ...]
    tools_json: str = ""
    tool_names: frozenset[str] = frozenset()
    chat_template_kwargs_json: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_output_tokens(self) -> int | None:
        """The row's own limit on one answer."""
        value = self.params.get("max_output_tokens")
        return int(value) if isinstance(value, int) and value > 0 else None


@lru_cache(maxsize=CACHED_ROWS)
def parse_row(text: str, source: str) -> Row:
    """Parse one line; raises InvalidInput that names ``source``."""
    fields = _object(text, source, "the row")
    create = fields.get("responses_create_params")
    if create is None:
        raise bad_row("responses_create_params is missing", source)
    if not isinstance(create, dict):
        raise bad_row("responses_create_params must be an object", source)
    _refuse_unknown(create, source)
    metadata = _metadata(create.get("metadata"), source)
    extra = _object(metadata.get("extra_body", "{}"), source, "metadata.extra_body")
    names, tools_json = _tools(create.get("tools"), source)
    return Row(
        source=source,
        json=text,
        fields=fields,
        messages=messages_of(create, source),
        tools_json=tools_json,
        tool_names=names,
        chat_template_kwargs_json=_template_kwargs(metadata, extra, source),
        params={**_params(create), "extra_body": extra},
    )


def bad_row(text: str, source: str) -> InvalidInput:
    """The error for a row that cannot be used."""
    return InvalidInput(f"Bad row: {text}", where=source, do="Correct the row in the data file.")


def _params(create: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("input", "instructions", "tools", "metadata")
    return {key: value for key, value in create.items() if key not in left_out and value is not None}


def _refuse_unknown(create: Mapping[str, Any], source: str) -> None:
    for key in create:
        if key in KNOWN_PARAMS:
            continue
        near = difflib.get_close_matches(key, KNOWN_PARAMS, n=1, cutoff=0.85)
        hint = f"; did you mean {near[0]}?" if near else "; put it into metadata.extra_body"
        raise bad_row(f"responses_create_params.{key} is not a known parameter{hint}", source)


def _metadata(value: Any, source: str) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise bad_row("metadata must be an object whose values are strings", source)
    return value


def _template_kwargs(metadata: Mapping[str, str], extra: Mapping[str, Any], source: str) -> str:
    given = extra.get("chat_template_kwargs") or {}
    own = _object(metadata.get("chat_template_kwargs", "{}"), source, "metadata.chat_template_kwargs")
    if not isinstance(given, dict):
        raise bad_row("extra_body.chat_template_kwargs must be an object", source)
    merged = {**given, **own}
    return json.dumps(merged) if merged else ""


def _tools(value: Any, source: str) -> tuple[frozenset[str], str]:
    if not value:
        return frozenset(), ""
    if not isinstance(value, list):
        raise bad_row("tools must be a list", source)
    names = [_tool_name(tool, source) for tool in value]
    if len(set(names)) != len(names):
        raise bad_row("two tools have the same name", source)
    return frozenset(names), json.dumps(value)


def _tool_name(tool: Any, source: str) -> str:
    name = tool.get("name") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(name, str) or not name:
        raise bad_row("every tool must have type 'function' and a name", source)
    if not isinstance(tool.get("parameters"), dict):
        raise bad_row(f"tool {name!r} has no parameters object", source)
    return name


def _object(text: str, source: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise bad_row(f"{what} is not JSON ({exc})", source) from exc
    if not isinstance(value, dict):
        raise bad_row(f"{what} is not a JSON object", source)
    return value
