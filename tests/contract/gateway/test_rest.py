"""What a client of the gateway relies on: resources, pages, problems, events, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import yaml

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from tests.unit.buffer.world import RUN, setup, spec, trajectory

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(20)]


def problem(answer: httpx.Response, status: int, reason: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = answer.json()
    assert (told["status"], told["reason"]) == (status, reason)
    return told


async def submit(stack: Any, recipe: dict[str, Any], *overrides: str) -> str:
    answer = await stack.http.post("/runs", json={"recipe": recipe, "overrides": list(overrides)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["run"])


async def test_a_run_from_submission_to_cancel(stack: Any, recipe: dict[str, Any]) -> None:
    run = await submit(stack, recipe, "grpo.max_num_steps=3")
    found = (await stack.http.get(f"/runs/{run}")).json()
    assert (found["name"], found["kind"], found["max_steps"]) == (recipe["name"], "grpo", 3)
    assert found["summary"]["run_id"] == run
    assert 0 < found["created"] < 1e11
    assert (await stack.http.post(f"/runs/{run}/pause")).json()["status"] == "paused"
    assert (await stack.http.post(f"/runs/{run}/resume")).json()["status"] != "paused"
    steps = (await stack.http.get(f"/runs/{run}/steps")).json()
    assert steps == {"steps": [], "next": None}
    assert (await stack.http.get(f"/runs/{run}/metrics")).json()["steps"] == []
    ended = await stack.http.post(f"/runs/{run}/cancel", json={"reason": "enough"})
    assert ended.status_code == 200
    async with asyncio.timeout(20):
        while (await stack.http.get(f"/runs/{run}")).json()["status"] != "cancelled":
            await asyncio.sleep(0.1)
    audit = (await stack.http.get(f"/runs/{run}/audit")).json()
    assert audit["balanced"] is True
    problem(await stack.http.post(f"/runs/{run}/pause"), 409, "REFUSED")


async def test_yaml_and_overrides_and_the_recipe_on_record(stack: Any, recipe: dict[str, Any]) -> None:
    answer = await stack.http.post(
        "/runs", content=yaml.safe_dump(recipe), params={"override": ["grpo.seed=99", "name=by yaml"]},
        headers={"content-type": "application/yaml"},
    )  # fmt: skip
    assert answer.status_code == 201, answer.text
    run = answer.json()["run"]
    kept = yaml.safe_load((stack.settings.home / "runs" / run / "recipe.yaml").read_text())
    assert (kept["grpo"]["seed"], kept["name"]) == (99, "by yaml")
    again = await stack.http.post("/runs", json={"recipe": recipe, "run": run})
    problem(again, 409, "CONFLICT")
    await stack.http.post(f"/runs/{run}/cancel")


async def test_runs_are_listed_in_pages(stack: Any, recipe: dict[str, Any]) -> None:
    made = [await submit(stack, recipe, f"name=page {i}") for i in range(3)]
    found: list[str] = []
    offset: int | None = 0
    while offset is not None:
        page = (await stack.http.get("/runs", params={"limit": 2, "offset": offset})).json()
        assert len(page["runs"]) <= 2
        found += [run["run"] for run in page["runs"]]
        offset = page["next"]
    assert [run for run in found if run in made] == made[::-1]
    assert len(found) == len(set(found))
    for run in made:
        await stack.http.post(f"/runs/{run}/cancel")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"grpo": {"max_num_stesp": 1}}, "max_num_steps"),
        ({"defaults": "/etc/passwd"}, "stands alone"),
        ({"name": "${env:HOME}"}, "cannot read the environment"),
        ({"name": "${e${.kind}nv:HOME}"}, ""),
    ],
)
async def test_a_bad_recipe_is_told_in_words(
    stack: Any, recipe: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    answer = await stack.http.post("/runs", json={"recipe": {**recipe, **change}})
    body = problem(answer, 422, "INVALID_RECIPE")
    assert told in f"{body['detail']} {body['do']}"
    text = yaml.safe_dump({**recipe, **change})
    answer = await stack.http.post("/runs", content=text, headers={"content-type": "text/yaml"})
    assert problem(answer, 422, "INVALID_RECIPE")["where"].startswith("recipe")


async def test_what_is_wrong_is_a_problem(stack: Any) -> None:
    assert "nowhere" in problem(await stack.http.get("/runs/nowhere"), 404, "NOT_FOUND")["detail"]
    problem(await stack.http.get("/runs/nowhere/events"), 404, "NOT_FOUND")
    problem(await stack.http.get("/runs", params={"limit": 0}), 422, "INVALID_INPUT")
    problem(await stack.http.get("/no/such/thing"), 404, "NOT_FOUND")
    problem(await stack.http.delete("/runs"), 405, "METHOD_NOT_ALLOWED")
    broken = await stack.http.post("/runs", content=b"{", headers={"content-type": "application/json"})
    problem(broken, 422, "INVALID_INPUT")
    gone = problem(await stack.http.get("/engines"), 503, "NOT_READY")
    assert gone["where"].startswith("refit at ")


async def test_a_large_body_is_refused_declared_or_not(stack: Any) -> None:
    size = stack.settings.max_body_bytes + 1
    problem(await stack.http.post("/runs", content=b"x" * size), 413, "TOO_LARGE")

    async def parts() -> Any:
        for _ in range(size // 65536 + 1):
            yield b"x" * 65536

    problem(await stack.http.post("/runs", content=parts()), 413, "TOO_LARGE")


async def read_events(lines: AsyncIterator[str], most: int = 1000) -> list[dict[str, str]]:
    """Events until the stream ends, or the first ``most``; who drops ``lines`` closes the stream."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    async for line in lines:
        if not line and event:
            found.append(event)
            event = {}
            if len(found) >= most:
                break
        key, colon, value = line.partition(": ")
        if colon and key:
            event[key] = value
    return found


async def test_events_end_with_the_run_and_go_on_where_a_client_stopped(
    stack: Any, recipe: dict[str, Any]
) -> None:
    run = await submit(stack, recipe)
    async with stack.http.stream("GET", f"/runs/{run}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        reading = asyncio.create_task(read_events(answer.aiter_lines()))
        await asyncio.sleep(0.3)
        assert not reading.done()
        await stack.http.post(f"/runs/{run}/cancel")
        events = await asyncio.wait_for(reading, 20)
    assert [int(event["id"]) for event in events[:-1]] == list(range(1, len(events)))
    assert events[-1]["event"] == "end"
    assert json.loads(events[0]["data"])["text"] == "queued"
    after = {"Last-Event-ID": "1"}
    async with stack.http.stream("GET", f"/runs/{run}/events", headers=after) as answer:
        assert await read_events(answer.aiter_lines()) == events[1:]
    last = {"Last-Event-ID": events[-2]["id"]}
    assert (await stack.http.get(f"/runs/{run}/events", headers=last)).status_code == 204
    wrong = {"Last-Event-ID": "x"}
    problem(await stack.http.get(f"/runs/{run}/events", headers=wrong), 422, "INVALID_INPUT")


async def test_streams_are_few_and_end_when_the_client_goes(stack: Any, recipe: dict[str, Any]) -> None:
    run = await submit(stack, recipe)
    path = f"/runs/{run}/events"
    async with stack.http.stream("GET", path) as first, stack.http.stream("GET", path) as second:
        lines = [first.aiter_lines(), second.aiter_lines()]
        await asyncio.gather(*(read_events(one, 1) for one in lines))
        told = problem(await stack.http.get(path), 429, "EXHAUSTED")
        assert "2 event streams" in told["detail"]
    async with asyncio.timeout(10):
        while True:
            async with stack.http.stream("GET", path) as again:
                if again.status_code == 200:
                    assert len(await read_events(again.aiter_lines(), 1)) == 1
                    break
            await asyncio.sleep(0.05)
    await stack.http.post(f"/runs/{run}/cancel")


async def test_trajectories_with_tokens_rewards_and_conversation(stack: Any) -> None:
    await stack.buffer.Setup(setup())
    fence = types.Fence(epoch=1)
    groups = [spec(ordinal) for ordinal in range(5)]
    await stack.buffer.OpenGroups(pb.OpenGroupsRequest(run=RUN, book="train", fence=fence, groups=groups))
    claimed = await stack.buffer.Claim(pb.ClaimRequest(run=RUN, worker="w1", max_samples=4))
    sent = [trajectory(work, reward=work.key.sample) for work in claimed.work]
    await stack.buffer.Append(pb.AppendRequest(worker="w1", trajectories=sent))
    async with asyncio.timeout(10):
        while (await stack.http.get(f"/runs/{RUN}/progress")).json()["groups_by_state"].get("ready", 0) != 1:
            await asyncio.sleep(0.05)
    path = f"/runs/{RUN}/groups/0/trajectories"
    found = (await stack.http.get(path)).json()["trajectories"]
    assert [one["sample"] for one in found] == [0, 1, 2, 3]
    assert [one["reward"]["value"] for one in found] == [0, 1, 2, 3]
    columns = {column.name: column for column in sent[2].columns}
    tokens = len(columns["mask"].data)
    assert {name: len(values) for name, values in found[2]["columns"].items()} == dict.fromkeys(
        columns, tokens
    )
    assert bytes(found[2]["columns"]["mask"]) == columns["mask"].data
    assert sum(segment["length"] for segment in found[2]["segments"]) == tokens
    assert found[2]["outcome"] == "completed"
    one = (await stack.http.get(path, params={"sample": 2, "tokens": False})).json()["trajectories"]
    assert one == [{**found[2], "columns": {}}]
    problem(await stack.http.get(f"/runs/{RUN}/groups/4/trajectories"), 409, "REFUSED")
    problem(await stack.http.get(f"/runs/{RUN}/groups/77/trajectories"), 404, "NOT_FOUND")
    letters = (await stack.http.get(f"/runs/{RUN}/dead-letters")).json()
    assert letters == {"letters": []}


async def test_groups_are_listed_in_pages_from_both_ends(stack: Any) -> None:
    async def pages(**params: Any) -> list[int]:
        found: list[int] = []
        cursor: int | None = None
        while True:
            asked = {"limit": 2, **params, **({} if cursor is None else {"cursor": cursor})}
            answer = await stack.http.get(f"/runs/{RUN}/groups", params=asked)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            found += [group["group"] for group in page["groups"]]
            cursor = page["next"]
            if cursor is None:
                return found

    assert await pages() == [0, 1, 2, 3, 4]
    assert await pages(newest=True) == [4, 3, 2, 1, 0]
    assert await pages(state="open") == [1, 2, 3, 4]
    first = (await stack.http.get(f"/runs/{RUN}/groups", params={"limit": 1})).json()["groups"][0]
    assert (first["state"], first["size"], first["payloads"]) == ("ready", 4, True)
    assert [sample["reward"] for sample in first["samples"]] == [0, 1, 2, 3]


async def test_the_overview_tells_who_is_there(stack: Any) -> None:
    found = (await stack.http.get("/health")).json()
    ready = {service["service"] for service in found["services"] if service["ready"]}
    assert (ready, found["ready"]) == ({"controller", "buffer", "gym"}, False)
    away = next(service for service in found["services"] if service["service"] == "trainer")
    assert away["live"] is False
    assert away["error"]
    root = str(stack.http.base_url).removesuffix("/api/v1/")
    async with httpx.AsyncClient(base_url=root) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert (await http.get("/readyz")).status_code == 200
        scraped = await http.get("/metrics")
        assert 'headrace_gateway_requests_total{method="GET",status="200"}' in scraped.text


async def test_the_description_names_every_answer(stack: Any) -> None:
    schema = (await stack.http.get("/openapi.json")).json()
    operations = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(operations) >= 18
    assert len({operation["operationId"] for _, _, operation in operations}) == len(operations)
    for path, _, operation in operations:
        if not path.startswith("/api/v1"):
            continue
        assert {"401", "404", "422", "503"} <= set(operation["responses"]), path
        good = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
        assert good["content"], path
        refused = operation["responses"]["404"]["content"]
        assert list(refused) == ["application/problem+json"]
