"""Any gRPC client can work with runs, if it has no more than the address, the token and server reflection."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from services.client import Client
from services.recipe.load import from_foreign, to_json
from services.runtime.errors import Unauthenticated
from tests.contract.serving import serving

SECRET = "5c0b9e7712aa4d38-reflect"
pytestmark = pytest.mark.timeout(90)


class WithToken(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Adds the header to every call, as ``grpcurl -H`` does."""

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        changed = details._replace(metadata=(("authorization", f"Bearer {SECRET}"),))
        return continuation(changed, request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _call


class Reflected:
    """Calls by name; requests and answers are JSON, types come over the wire."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        self.services = list(database.get_services())
        self._service = DescriptorPool(database).FindServiceByName(service)
        self.methods = [method.name for method in self._service.methods]

    def __call__(self, name: str, **fields: Any) -> Any:
        method = self._service.methods_by_name[name]
        kind = GetMessageClass(method.output_type)
        shape = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = shape(
            f"/{self._service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        answer = call(json_format.ParseDict(fields, GetMessageClass(method.input_type)()), timeout=20)
        if method.server_streaming:
            return (json_format.MessageToDict(one) for one in answer)
        return json_format.MessageToDict(answer)


@pytest.fixture
def recipe_json(tmp_path: Path) -> str:
    recipe = {
        "kind": "grpo", "name": "by reflection",
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 2},
        "policy": {"model_name": "m", "train_global_batch_size": 8},
        "data": {"train": {"data_path": str(tmp_path / "rows.jsonl")}},
    }  # fmt: skip
    recipe["grpo"]["val_period"] = 0  # type: ignore[index]
    return to_json(from_foreign(recipe).recipe)


def test_a_client_without_our_code_submits_lists_watches_and_cancels(
    tmp_path: Path, recipe_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    with serving("controller", tmp_path, 30) as served:
        with grpc.insecure_channel(served.address) as plain:
            with pytest.raises(grpc.RpcError) as caught:
                list(ProtoReflectionDescriptorDatabase(plain).get_services())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            runs = Reflected(grpc.intercept_channel(plain, WithToken()), "headrace.v1.Runs")
            assert "headrace.v1.Runs" in runs.services
            assert {"Submit", "Get", "List", "Watch", "Pause", "Resume", "Cancel", "Audit"} <= set(
                runs.methods
            )
            run = runs("Submit", recipeJson=recipe_json)["run"]
            assert [found["run"] for found in runs("List", limit=5)["runs"]] == [run]
            assert json.loads(runs("Get", run=run)["summaryJson"])["run_id"] == run
            assert next(runs("Watch", run=run))["text"] == "queued"
            assert runs("Pause", run=run)["status"] == "RUN_STATUS_PAUSED"
            with Client(served.address) as client:
                assert client.unpause(run).run == run
                assert list(client.steps(run)) == []
                assert [found.run for found in client.list()] == [run]
            runs("Cancel", run=run, reason="seen enough")
            end = time.monotonic() + 30
            while runs("Get", run=run)["status"] != "RUN_STATUS_CANCELLED":
                assert time.monotonic() < end
                time.sleep(0.1)
            monkeypatch.setenv("HEADRACE_TOKEN", SECRET[::-1])
            with Client(served.address) as stranger, pytest.raises(Unauthenticated):
                stranger.list()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0, served.log.read_text()
        assert SECRET not in served.log.read_text()
