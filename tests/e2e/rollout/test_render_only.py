"""An engine that renders only: enough for supervised runs, and refused where a model is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protos.headrace.v1 import rollout_pb2, rollout_pb2_grpc, types_pb2
from services.runtime import rpc
from services.runtime.errors import InvalidInput, NotReady, Unsupported
from services.runtime.service import start_server
from services.runtime.settings import ServiceSettings
from tests.e2e.rollout.conftest import Host, Roster, policy, turn

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
async def engine(tmp_path):
    """The address of a render-only host; its roster."""
    roster = Roster()
    refit = await start_server(roster, ServiceSettings(home=tmp_path))
    host = Host(tmp_path, refit.address, backend="render")
    try:
        yield rpc.stub(rollout_pb2_grpc.EngineStub, await host.address(), name="engine"), roster, host
    finally:
        host.kill()
        await refit.stop(0)
        await rpc.close_channels()


async def test_it_renders_and_nothing_else(engine, model_dir):
    host, roster, process = engine
    info = await host.Setup(rollout_pb2.EngineSetupRequest(run="s", policy_json=policy(model_dir)))
    assert (info.name, info.run, info.ready) == ("render", "s", True)
    await roster.find(lambda found: found.address == info.address)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in process.tree()]
    assert not any("vllm/_C" in text for text in maps)
    worker = rpc.stub(rollout_pb2_grpc.EngineStub, info.address, name="engine")
    chat = [types_pb2.Message(role="user", content="a"), types_pb2.Message(role="assistant", content="b")]
    request = rollout_pb2.RenderRequest(run="s", conversations=[rollout_pb2.Conversation(messages=chat)] * 3)
    answer = await worker.Render(request)
    assert [sum(item.mask) for item in answer.rendered] == [2, 2, 2]
    with pytest.raises(Unsupported, match="renders only"):
        await worker.Turn(turn(["x"]))


async def test_another_run_gets_a_fresh_worker(engine, model_dir):
    host, roster, _ = engine
    request = rollout_pb2.EngineSetupRequest(run="one", policy_json=policy(model_dir))
    one = await host.Setup(request)
    assert (await host.Setup(request)).engine == one.engine
    request.run = "two"
    two = await host.Setup(request, timeout=60)
    assert two.run == "two"
    assert two.engine != one.engine
    await roster.find(lambda info: info.run == "two")
    assert one.engine not in roster.infos


async def test_bad_input_is_one_clear_line(engine, model_dir):
    host, _, _ = engine
    request = rollout_pb2.EngineSetupRequest(run="r", policy_json=policy(model_dir / "nowhere"))
    with pytest.raises(InvalidInput, match="no model directory"):
        await host.Setup(request, timeout=60)
    body = json.loads(policy(model_dir))
    del body["model_name"]
    request.policy_json = json.dumps(body)
    with pytest.raises(InvalidInput, match="names no model"):
        await host.Setup(request, timeout=60)


async def test_a_worker_that_does_not_start_in_time_is_replaced(tmp_path, model_dir):
    roster = Roster()
    refit = await start_server(roster, ServiceSettings(home=tmp_path))
    host = Host(tmp_path, refit.address, backend="render", start_seconds="0.05")
    try:
        stub = rpc.stub(rollout_pb2_grpc.EngineStub, await host.address(), name="engine")
        first = await roster.find(lambda info: True)
        request = rollout_pb2.EngineSetupRequest(run="r", policy_json=policy(model_dir))
        with pytest.raises(NotReady):
            await stub.Setup(request, timeout=1)
        await roster.find(lambda info: info.engine != first.engine)
    finally:
        host.kill()
        await refit.stop(0)
        await rpc.close_channels()
