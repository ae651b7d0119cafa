"""The trainer as a real torchrun job: train, save, die, resume; no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.headrace.v1 import rollout_pb2, trainer_pb2, trainer_pb2_grpc, types_pb2
from services.runtime.tracing import read_spans
from tests.e2e.trainer.fake_buffer import FakeBuffer, manifest, step_groups
from tests.e2e.trainer.model import make_model, recipe

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[3]
RUN = "r1"


class Job:
    """One launcher, its address and a stub."""

    def __init__(self, home: Path, buffer: FakeBuffer) -> None:
        self.ready = home / "ready"
        self.ready.unlink(missing_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HEADRACE_TRAINER_LISTEN": "127.0.0.1:0",
            "HEADRACE_TRAINER_HOME": str(home),
            "HEADRACE_TRAINER_READY_FILE": str(self.ready),
            "HEADRACE_TRAINER_BUFFER": f"127.0.0.1:{buffer.port}",
            "HEADRACE_TRAINER_THREADS": "1",
        }
        self.log = (home / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer_svc.service"], env=env, stdout=self.log, stderr=self.log
        )
        record = self._wait_ready()
        self.rank = psutil.Process(record["pid"])
        self.channel = grpc.insecure_channel(record["address"])
        self.stub = trainer_pb2_grpc.TrainerStub(self.channel)

    def _wait_ready(self) -> dict[str, Any]:
        end = time.monotonic() + 60
        while not self.ready.exists():
            assert self.process.poll() is None, "the launcher ended"
            assert time.monotonic() < end
            time.sleep(0.05)
        return json.loads(self.ready.read_text())

    def family(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def wait_loaded(self) -> None:
        """Ready for Setup: the health of the service's full name."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        end = time.monotonic() + 60
        request = health_pb2.HealthCheckRequest(service="headrace.v1.Trainer")
        while stub.Check(request, timeout=5).status != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < end
            time.sleep(0.05)

    def setup(self, folder: Path, epoch: int = 1) -> trainer_pb2.TrainerState:
        self.wait_loaded()
        request = trainer_pb2.TrainerSetupRequest(
            run=RUN,
            kind="grpo",
            recipe_json=recipe(folder / "base"),
            checkpoint_dir=str(folder / "checkpoints"),
            fence=types_pb2.Fence(epoch=epoch),
            seed=7,
        )
        return self.stub.Setup(request, timeout=60)

    def step(self, step: int, epoch: int = 1) -> trainer_pb2.StepResponse:
        request = trainer_pb2.StepRequest(
            run=RUN,
            fence=types_pb2.Fence(epoch=epoch, step=step),
            manifest=manifest(RUN, step, step_groups(RUN, step)),
        )
        return self.stub.Step(request, timeout=60)

    def save(self) -> trainer_pb2.SaveResponse:
        request = trainer_pb2.SaveRequest(run=RUN, fence=types_pb2.Fence(epoch=1), run_state_json='{"a": 1}')
        return self.stub.Save(request, timeout=60)

    def end(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer")
    make_model(path / "base")
    return path


@pytest.fixture
def buffer() -> Iterator[FakeBuffer]:
    with FakeBuffer() as fake:
        yield fake


def gone(processes: list[psutil.Process], within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while any(_alive(each) for each in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_train_save_kill_resume(folder: Path, buffer: FakeBuffer) -> None:
    first = Job(folder, buffer)
    try:
        first.wait_loaded()
        with pytest.raises(grpc.RpcError) as early:
            first.step(0)
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE
        fresh = first.setup(folder)
        assert (fresh.completed_steps, fresh.vocab_size, fresh.HasField("checkpointed_steps")) == (
            0,
            64,
            False,
        )
        _check_loopback(first)
        results = [first.step(number) for number in range(2)]
        assert first.step(1) == _repeated(results[1])
        saved = first.save()
        assert (saved.completed_steps, first.save().path) == (2, saved.path)
        after = [first.step(number) for number in (2, 3)]
        state = first.stub.Status(trainer_pb2.TrainerStatusRequest(), timeout=5)
        assert (state.completed_steps, state.checkpointed_steps, state.optimizer_steps) == (4, 2, 8)
        _check_transport(first)
        family = first.family()
        first.rank.kill()
        assert first.process.wait(20) == 1
        assert gone(family)
    finally:
        first.end()
    second = Job(folder, buffer)
    try:
        restored = second.setup(folder, epoch=2)
        assert (restored.completed_steps, restored.optimizer_steps) == (2, 4)
        assert restored.process != state.process
        assert second.step(1, epoch=2) == _repeated(results[1])
        replayed = [second.step(number, epoch=2) for number in (2, 3)]
        for old, new in zip(after, replayed, strict=True):
            assert new.metrics["lr"] == old.metrics["lr"]
            assert new.metrics["loss"] == pytest.approx(old.metrics["loss"], abs=1e-6)
            assert new.metrics["grad_norm"] == pytest.approx(old.metrics["grad_norm"], rel=1e-6)
        with pytest.raises(grpc.RpcError) as fenced:
            second.step(4, epoch=1)
        assert fenced.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        family = second.family()
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(20) == 0
        assert gone(family)
        assert not list(Path("/dev/shm").glob(f"headrace-{RUN}-*"))
    finally:
        second.end()
    steps = [span for span in read_spans(folder / "runs" / RUN) if span["name"] == "train.step"]
    # What the killed process had not written yet is lost; the one that drained has written all.
    assert len(steps) >= 2
    assert all(len(span["links"]) == 16 for span in steps)
    assert all(span["parent_id"] is None for span in steps)


def test_status_answers_while_a_step_runs(folder: Path, buffer: FakeBuffer) -> None:
    job = Job(folder, buffer)
    try:
        completed = job.setup(folder).completed_steps
        buffer.delay = 1.5
        request = trainer_pb2.StepRequest(
            run=RUN,
            fence=types_pb2.Fence(epoch=1, step=completed),
            manifest=manifest(RUN, completed, step_groups(RUN, completed)),
        )
        running = job.stub.Step.future(request, timeout=60)
        time.sleep(0.3)
        started = time.monotonic()
        assert job.stub.Status(trainer_pb2.TrainerStatusRequest(), timeout=5).busy_with == "Step"
        assert time.monotonic() - started < 1.0
        family = job.family()
        running.result()
        job.process.kill()
        assert gone(family)
    finally:
        job.end()


def refusal(home: Path, **env: str) -> list[str]:
    """What the launcher says when it refuses its input."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer_svc.service"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HEADRACE_TRAINER_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    return done.stderr.splitlines()


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, HEADRACE_TRAINER_NPROC="2") == [
        "trainer: 2 trainer ranks are not supported yet (HEADRACE_TRAINER_NPROC). Set it to 1."
    ]
    (line,) = refusal(tmp_path, HEADRACE_TRAINER_BUFER="127.0.0.1:1")
    assert "HEADRACE_TRAINER_BUFFER?" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = refusal(tmp_path, HEADRACE_TRAINER_LISTEN=f"127.0.0.1:{port}")
    assert line.startswith(f"trainer: Port {port} is in use")


def _repeated(response: trainer_pb2.StepResponse) -> trainer_pb2.StepResponse:
    expected = trainer_pb2.StepResponse()
    expected.CopyFrom(response)
    expected.repeated = True
    return expected


def _check_transport(job: Job) -> None:
    """Staged bytes are the weights that Score scores with."""
    version = types_pb2.PolicyVersion(incarnation=0, number=4)
    request = trainer_pb2.StageWeightsRequest(
        run=RUN, version=version, transport="shm", fence=types_pb2.Fence(epoch=1, step=3)
    )
    staged = job.stub.StageWeights(request, timeout=30)
    assert staged == job.stub.StageWeights(request, timeout=30)
    assert Path("/dev/shm", staged.shm_name).exists()
    assert json_format.MessageToDict(staged.version)["number"] == 4
    ids = np.arange(1, 9, dtype="<i4")
    scored = job.stub.Score(
        rollout_pb2.ScoreTokensRequest(
            run=RUN, sequences=[ids.tobytes(), ids[:3].tobytes()], temperature=0.7
        ),
        timeout=30,
    )
    long, short = (np.frombuffer(each, dtype="<f4") for each in scored.logprobs)
    assert (long[0], short[0]) == (0.0, 0.0)
    np.testing.assert_allclose(long[:3], short, atol=1e-5)
    assert (long[1:] < 0).all()
    released = trainer_pb2.ReleaseWeightsRequest(run=RUN, version=version)
    job.stub.ReleaseWeights(released, timeout=10)
    assert not Path("/dev/shm", staged.shm_name).exists()


def _check_loopback(job: Job) -> None:
    """Nothing of the job listens beyond this machine, torchrun's rendezvous included."""
    for process in job.family():
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip.removeprefix("::ffff:").startswith("127."), connection
