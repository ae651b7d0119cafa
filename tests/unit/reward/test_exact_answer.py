"""Golden cases of exact_answer."""

from __future__ import annotations

import pytest

from reward_svc.verifiers.base import Item, VerifierError
from reward_svc.verifiers.exact_answer import score


def judge(text, expected, **row):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return score(Item(row={"expected_answer": expected, **row}, messages=messages)).value


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("4", "4", 1),
        ("5", "4", 0),
        ("", "4", 0),
        ("  4\n", "4", 1),
        ("4.", "4", 1),
        ("**4**", "4", 1),
        ("$-4$", "-4", 1),
        ("4.0", "4", 1),
        ("+4", "4", 1),
        ("-0", "0", 1),
        ("1,000", "1000", 1),
        ("1,00", "100", 0),
        ("44", "4", 0),
        ("4 apples", "4", 0),
        ("1/2", "0.5", 0),
        ("PARIS", "Paris", 1),
        ("new   york", "New York", 1),
        ("ﬁve", "five", 1),
        ("２", "2", 1),
        ("Let me add.\nAnswer: 4", "4", 1),
        ("Answer: 3\nNo.\nFinal answer: 4", "4", 1),
        ("**Answer:** 4", "4", 1),
        ("The answer: 4.", "4", 1),
        ("Answer:", "4", 0),
        ("Answer: 3\nAnswer:", "3", 1),
        ("<answer>3</answer> no <answer>\n4 </answer>", "4", 1),
        ("<think>Answer: 3</think>4", "4", 1),
        ("<think>4", "4", 0),
        ("4", 4, 1),
        ("true", True, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("1" * 5000, "1", 0),
    ],
)
def test_golden(text, expected, value):
    assert judge(text, expected) == value


def test_the_expected_answer_may_stand_in_verifier_metadata():
    assert judge("4", None, verifier_metadata={"expected_answer": "4"}) == 1


def test_the_last_assistant_message_is_the_answer():
    said = [("assistant", "4"), ("user", "sure?"), ("assistant", "5"), ("tool", "4")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert score(Item(row={"expected_answer": "5"}, messages=messages)).value == 1


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({}, [{"role": "assistant", "content": "4"}]),
        ({"expected_answer": []}, [{"role": "assistant", "content": "4"}]),
        ({"expected_answer": "4"}, [{"role": "user", "content": "4"}]),
    ],
)
def test_what_cannot_be_judged_is_an_error_and_not_wrong(row, messages):
    with pytest.raises(VerifierError):
        score(Item(row=row, messages=messages))
