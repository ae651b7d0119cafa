"""Scoring over gRPC."""

from __future__ import annotations

import pytest

from protos.headrace.v1 import reward_pb2, types_pb2
from services.runtime import tracing
from services.runtime.errors import InvalidInput, NotReady

VERIFIER_ERROR = types_pb2.OUTCOME_VERIFIER_ERROR


async def test_results_come_in_the_order_of_the_items(rewards, make):
    await rewards.setup()
    answers = ["4", "5", "Answer: 4", "no"]
    results = await rewards.score(*(make.item(answer, group=at) for at, answer in enumerate(answers)))
    assert [result.reward.value for result in results] == [1, 0, 1, 0]
    assert results[0].reward.verifier == "exact_answer"
    assert [stage.name for stage in results[0].reward.stages] == ["verifier"]


async def test_an_item_that_cannot_be_judged_fails_alone_and_is_no_zero(rewards, make):
    await rewards.setup()
    odd = make.item("4")
    odd.row_json = "{}"
    broken = make.item("4")
    broken.row_json = "{"
    results = await rewards.score(make.item("4"), odd, broken, make.item("4", verifier="nobody"))
    assert [result.WhichOneof("result") for result in results] == ["reward", "failure", "failure", "failure"]
    assert {result.failure.outcome for result in results[1:]} == {VERIFIER_ERROR}
    assert "expected_answer" in results[1].failure.message
    assert "not JSON" in results[2].failure.message
    assert "Unknown verifier 'nobody'" in results[3].failure.message


MATH = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\frac{2}{4}}", r"\frac12", 1),
    ("the answer is $x^2+2x+1$", "(x+1)^2", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
    (r"\boxed{[1, 2)}", "[1, 2)", 1),
    (r"\boxed{x = 3}", "$3$", 1),
    (r"\boxed{3} or rather \boxed{4}", "5", 0),
    (r"<think>\boxed{3}</think>\boxed{4}", "4", 1),
    (r"\boxed{\frac{", "3", 0),
    ("no idea", "4", 0),
    ("", "4", 0),
]


async def test_math_verify_golden(math_rewards, make):
    items = [make.item(said, verifier="math_verify", expected_answer=expected) for said, expected, _ in MATH]
    results = await math_rewards.score(*items)
    assert [result.failure.message for result in results if result.HasField("failure")] == []
    judged = [
        (said, expected, result.reward.value)
        for (said, expected, _), result in zip(MATH, results, strict=True)
    ]
    assert judged == MATH


async def test_math_that_never_ends_is_a_verifier_error(math_rewards, make):
    await math_rewards.setup(verifiers={"math_verify": {"timeout_s": 0.5}})
    endless = make.item(r"\boxed{9^{9^{9^9}}}", verifier="math_verify")
    (result,) = await math_rewards.score(endless)
    assert result.failure.outcome == VERIFIER_ERROR
    assert "took longer than 0.5 s" in result.failure.message


async def test_an_expected_answer_without_mathematics_is_the_rows_fault(math_rewards, make):
    (result,) = await math_rewards.score(make.item("4", verifier="math_verify", expected_answer=""))
    assert result.failure.outcome == VERIFIER_ERROR


async def test_the_service_itself_never_imports_the_heavy_package(rewards):
    import subprocess
    import sys

    heavy = "('sympy', 'math_verify', 'torch', 'transformers')"
    code = f"import reward_svc.service, sys; raise SystemExit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_scoring_before_setup_says_that_there_is_no_run(rewards, make):
    with pytest.raises(NotReady) as found:
        await rewards.score(make.item("4"), timeout=0.3)
    assert found.value.reason == "NO_RUN"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"default_verifier": "nobody"}, "Unknown verifier 'nobody'"),
        ({"environments": {"x": {"verifier": "nobody"}}}, "Unknown verifier 'nobody'"),
        ({"verifiers": {"nobody": {}}}, "Unknown verifier 'nobody'"),
        ({"verifiers": {"x": {"options": {"path": "no.such:f", "isolated": False}}}}, "no.such:f"),
        ({"verifiers": {"x": {"timeout_s": 0}}}, "timeout_s"),
    ],
)
async def test_setup_refuses_what_does_not_exist(rewards, env, said):
    with pytest.raises(InvalidInput, match=said):
        await rewards.setup(**env)


async def test_verifiers_are_listed_with_their_isolation(rewards, users):
    await rewards.setup(**users)
    answer = await rewards.stub.ListVerifiers(reward_pb2.ListVerifiersRequest())
    listed = {known.name: known.isolated for known in answer.verifiers}
    assert listed == {
        "behave": True, "exact_answer": False, "later": True, "length": True, "math_verify": True,
    }  # fmt: skip


async def test_each_item_has_a_span_below_the_gyms(rewards, make, tmp_path):
    tracing.setup("reward", tmp_path)
    await rewards.setup()
    item = make.item("4", group=5)
    item.trace.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    await rewards.score(item)
    tracing.flush()
    spans = [
        span for span in tracing.read_spans(tmp_path / "runs" / make.run) if span["name"] == "reward.score"
    ]
    assert [(span["trace_id"], span["parent_id"]) for span in spans] == [("1" * 32, "2" * 16)]
    assert spans[0]["attributes"]["headrace.group"] == "5"
