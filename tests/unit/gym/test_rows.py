"""Gym JSONL rows: what is accepted, and that errors name the file and the line."""

from __future__ import annotations

import json

import pytest

from gym_svc.rows import parse_row
from services.runtime.errors import InvalidInput


def row(**create):
    return json.dumps({"responses_create_params": create, "expected_answer": 4})


def parsed(**create):
    return parse_row(row(**create), "train.jsonl:17")


def said(found):
    return [(message.role, message.content) for message in found.messages]


def test_a_string_is_one_user_message():
    assert said(parsed(input="2+2?")) == [("user", "2+2?")]


def test_roles_and_text_parts():
    found = parsed(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Numbers only."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "2?"}],
            },
        ],
    )
    assert said(found) == [("system", "Be brief."), ("system", "Numbers only."), ("user", "2+2?")]


def test_calls_and_outputs_become_an_assistant_and_a_tool_message():
    found = parsed(
        input=[
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "look it up"}]},
            {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
    )
    assert [message.role for message in found.messages] == ["user", "assistant", "tool"]
    assistant, tool = found.messages[1:]
    assert assistant.reasoning == "look it up"
    assert [call.id for call in assistant.tool_calls] == ["c1", "c2"]
    assert (tool.tool_call_id, tool.content) == ("c1", "rain")


def test_metadata_holds_json_strings():
    found = parsed(
        input="x",
        max_output_tokens=32,
        metadata={
            "extra_body": '{"top_k": 5, "chat_template_kwargs": {"a": 1, "b": 1}}',
            "chat_template_kwargs": '{"b": 2}',
        },
    )
    assert json.loads(found.chat_template_kwargs_json) == {"a": 1, "b": 2}
    assert found.params["extra_body"]["top_k"] == 5
    assert found.max_output_tokens == 32


def test_tools_keep_their_definition_and_name_what_may_be_called():
    tool = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": None}
    found = parsed(input="x", tools=[tool])
    assert json.loads(found.tools_json) == [tool]
    assert found.tool_names == {"get"}


def test_verifier_fields_stay_as_they_are():
    assert parsed(input="x").fields["expected_answer"] == 4


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "responses_create_params is missing"),
        ('{"responses_create_params": 3}', "must be an object"),
        (row(), "input must be"),
        (row(input=[]), "input must be"),
        (row(input="x", top_k=3), "extra_body"),
        (row(input="x", max_outputs_tokens=3), "did you mean max_output_tokens"),
        (row(input="x", metadata={"a": 1}), "values are strings"),
        (row(input="x", metadata={"extra_body": "{"}), "metadata.extra_body is not JSON"),
        (row(input=[{"role": "tool", "content": "x"}]), r"input\[0\].role"),
        (row(input=[{"role": "user"}]), r"input\[0\].content"),
        (
            row(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]),
            "input_image",
        ),
        (row(input=[{"type": "computer_call"}]), "computer_call"),
        (row(input="x", tools=[{"type": "function", "name": "f"}]), "no parameters"),
        (row(input="x", tools=[{"type": "web_search"}]), "type 'function'"),
        (row(input="x", tools=[{"type": "function", "name": "f", "parameters": {}}] * 2), "same name"),
    ],
)
def test_errors_name_what_is_wrong_and_where(text, what):
    with pytest.raises(InvalidInput, match=what) as found:
        parse_row(text, "train.jsonl:17")
    assert found.value.where == "train.jsonl:17"
