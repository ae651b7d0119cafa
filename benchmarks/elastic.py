"""Samples per second of a run while two gym workers and one engine have joined, against the same run without
them.

A run of the demo's model, one step ahead and in flight, whose throughput is bound by how many samples its
gym worker holds: few at a time, and each waits for its environment. During the run two gym workers and one
engine are started as processes of their own, measured, and ended by SIGTERM; twice. Afterwards every sample
must have been handed in once, the books must balance, and whatever the joined engines answered must come from
versions that were committed by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import yaml

from benchmarks.async_parts.runs import RECIPES, ROOT, Folder
from benchmarks.report import Claim, say
from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import buffer_pb2_grpc, gym_pb2, gym_pb2_grpc, refit_pb2, refit_pb2_grpc
from protos.headrace.v1.types_pb2 import Trajectory
from services.buffer.audit import audit_file
from services.runtime import rpc, spawn
from services.runtime.errors import Corrupt, HeadraceError, NotReady

SUMMARY = "samples/s with two gym workers and an engine joined, against the same run without them"
BAR = 1.2
PLUGIN = "benchmarks.async_parts.latency:Latency"
PROMPTS, SAMPLES = 8, 4
LIMIT_S = 120.0
Peers = dict[str, str]


def run(args: Sequence[str]) -> list[Claim]:
    """Measure; one claim. Raises Corrupt when a sample was lost, doubled or of an uncommitted version."""
    options = _parse(args)
    options.out.mkdir(parents=True, exist_ok=True)
    Folder(options.out, 0).prepare()
    return [asyncio.run(_Elastic(options).measure())]


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench elastic", description=SUMMARY)
    parser.add_argument("--concurrency", type=int, default=8, help="samples in flight in one gym worker")
    parser.add_argument("--latency", type=float, default=0.6, help="seconds that an environment takes")
    parser.add_argument("--window", type=float, default=12.0, help="seconds of each measurement")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench-async"), help="model, rows and runs")
    return parser.parse_args(args)


class _Elastic:
    """One run, and those who join it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.out.resolve()
        self._home = self._folder / "home-elastic"
        self._before: set[Path] = self._ready_runs()
        self._joined: list[subprocess.Popen[bytes]] = []
        self._engines: set[str] = set()
        self._spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    async def measure(self) -> Claim:
        """The whole bench."""
        with (self._folder / "elastic.log").open("wb") as log:
            command = [sys.executable, "-m", "services.cli.main", "run", str(self._recipe()), "--json"]
            running = _start(command, self._environment(), log)
            try:
                return await self._during(running, log.name)
            finally:
                self._leave()
                running.terminate()
                running.wait(60)
                await rpc.close_channels()

    async def _during(self, running: subprocess.Popen[bytes], log: str) -> Claim:
        folder = await self._run_folder(running, log)
        peers = await self._peers(folder)
        await self._flowing(peers, folder.name)
        await self._window(joined=False)
        for number in range(self._options.cycles):
            say(f"cycle {number + 1}: two gym workers and an engine join")
            await self._join(peers, folder.name, number)
            await self._window(joined=True)
            self._leave()
            say(f"cycle {number + 1}: they have left")
            await self._window(joined=False)
        found = await self._trajectories(peers, folder.name)
        versions = await self._versions(peers, folder.name)
        await self._cancel(running, peers)
        return self._claim(folder, found, versions)

    def _recipe(self) -> Path:
        options = self._options
        recipe = {
            "defaults": str(RECIPES / "arithmetic-async.yaml"),
            "name": "bench-elastic",
            "stack": {"gym_concurrency": options.concurrency, "claim_timeout_s": 30, "rescore_samples": 0},
            "grpo": {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": SAMPLES, "val_period": 0,
                     "max_num_steps": 100_000, "val_at_start": False, "val_at_end": False},
            "policy": {"model_name": str(self._folder / "warm"),
                       "train_global_batch_size": PROMPTS * SAMPLES},
            "data": {"train": {"data_path": str(self._folder / "train.jsonl")},
                     "validation": {"data_path": str(self._folder / "validation.jsonl")}},
            "env": {"environments": {"single_turn": {
                "options": {"path": PLUGIN, "seconds": options.latency}}}},
            "checkpointing": {"enabled": False},
        }  # fmt: skip
        path = self._folder / "elastic.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    def _environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        return {**os.environ, "PYTHONPATH": path, "HEADRACE_HOME": str(self._home), **more}

    async def _run_folder(self, running: subprocess.Popen[bytes], log: str) -> Path:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and running.poll() is None:
            fresh: set[Path] = self._ready_runs() - self._before
            if fresh:
                return fresh.pop()
            await asyncio.sleep(0.2)
        raise NotReady("The run did not start", where=log)

    def _ready_runs(self) -> set[Path]:
        """Folders of runs whose controller answers (or did)."""
        files = list(self._home.glob("runs/*/ready/controller.json"))
        return {file.parents[1] for file in files}

    async def _peers(self, folder: Path) -> Peers:
        names = ("buffer", "rollout", "reward", "refit", "controller")
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            files = {name: folder / "ready" / f"{name}.json" for name in names}
            if all(path.is_file() for path in files.values()):
                return {name: json.loads(path.read_text())["address"] for name, path in files.items()}
            await asyncio.sleep(0.2)
        raise NotReady("The run's services did not start", where=str(folder))

    async def _flowing(self, peers: Peers, run: str) -> None:
        """Wait until steps are being trained."""
        buffer = rpc.stub(buffer_pb2_grpc.BufferStub, peers["buffer"], name="buffer")
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                seen = await buffer.Progress(pb.ProgressRequest(run=run, book="train"), timeout=5)
            except HeadraceError:
                seen = pb.ProgressResponse()
            if seen.groups.trained >= 3 * PROMPTS:
                return
            await asyncio.sleep(0.5)
        raise NotReady("No step was trained", where=run)

    async def _join(self, peers: Peers, run: str, cycle: int) -> None:
        """Start two gym workers and an engine; return once they work."""
        ready = []
        for name in ("gym-a", "gym-b", "engine"):
            service = name.partition("-")[0]
            file = self._folder / f"elastic-{cycle}-{name}.json"
            file.unlink(missing_ok=True)
            prefix = f"HEADRACE_{service.upper()}_"
            own = {
                "LISTEN": "127.0.0.1:0",
                "READY_FILE": str(file),
                "LOG_FILE": str(file.with_suffix(".log")),
            }
            if service == "gym":
                own |= {peer.upper(): peers[peer] for peer in ("buffer", "rollout", "reward")}
                own |= {"CONCURRENCY": str(self._options.concurrency)}
            else:
                own |= {"REFIT": peers["refit"]}
            environment = self._environment(**{prefix + key: value for key, value in own.items()})
            command = [sys.executable, "-m", "services.cli.main", "serve", service]
            self._joined.append(_start(command, environment, None))
            ready.append(file)
        await self._working(peers, run, ready)

    async def _working(self, peers: Peers, run: str, files: Sequence[Path]) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if all(file.is_file() for file in files) and await self._serving(peers) >= 2:
                gyms = [json.loads(file.read_text())["address"] for file in files[:2]]
                if all([await self._claims(address, run) for address in gyms]):
                    return
            await asyncio.sleep(0.5)
        raise NotReady("Who joined did not begin to work", where=str(files[0].parent))

    async def _serving(self, peers: Peers) -> int:
        """Engines that serve; those that came after the first are remembered."""
        stub = rpc.stub(refit_pb2_grpc.RefitStub, peers["refit"], name="refit")
        watch = stub.WatchRoster(refit_pb2.WatchRosterRequest(), timeout=10)
        roster: refit_pb2.Roster = await anext(aiter(watch))
        known = [entry.info.engine for entry in roster.engines]
        self._engines.update(known[1:])
        return sum(entry.state == refit_pb2.ENGINE_STATE_SERVING for entry in roster.engines)

    async def _claims(self, address: str, run: str) -> bool:
        stub = rpc.stub(gym_pb2_grpc.GymStub, address, name="gym")
        status = await stub.Status(gym_pb2.GymStatusRequest(), timeout=5)
        return bool(status.run == run)

    async def _window(self, *, joined: bool) -> None:
        await asyncio.sleep(1.0)
        began = time.time()
        await asyncio.sleep(self._options.window)
        self._spans[joined].append((began, time.time()))

    def _leave(self) -> None:
        for process in self._joined:
            process.terminate()
        for process in self._joined:
            process.wait(60)
        self._joined.clear()

    async def _trajectories(self, peers: Peers, run: str) -> list[Trajectory]:
        """Everything that was trained so far, as it lies in the buffer."""
        stub = rpc.stub(buffer_pb2_grpc.BufferStub, peers["buffer"], name="buffer")
        found: list[Trajectory] = []
        at = 0
        while True:
            request = pb.ListGroupsRequest(run=run, book="train", from_group=at, limit=200)
            groups = (await stub.ListGroups(request)).groups
            wanted = [group.group for group in groups if group.payloads]
            parts: list[bytes] = []
            async for chunk in stub.Fetch(pb.FetchRequest(run=run, book="train", groups=wanted)):
                parts.append(chunk.data)
                if chunk.last:
                    found += pb.TrajectoryGroup.FromString(b"".join(parts)).trajectories
                    parts = []
            if not groups:
                return found
            at = groups[-1].group + 1

    async def _versions(self, peers: Peers, run: str) -> dict[int, int]:
        """When each version was committed, by number (ns)."""
        stub = rpc.stub(refit_pb2_grpc.RefitStub, peers["refit"], name="refit")
        answer = await stub.ListVersions(refit_pb2.ListVersionsRequest(run=run, limit=100_000))
        return {v.version.number: v.at_ns for v in answer.versions if v.state != "failed"}

    async def _cancel(self, running: subprocess.Popen[bytes], peers: Peers) -> None:
        from services.client import AsyncClient

        async with AsyncClient(peers["controller"]) as client:
            (current, *_) = await client.list()
            await client.cancel(current.run, "measured")
        await asyncio.to_thread(running.wait, LIMIT_S)

    def _claim(self, folder: Path, found: Sequence[Trajectory], versions: dict[int, int]) -> Claim:
        audit = audit_file(folder / "ledger.jsonl")
        if not audit.balanced:
            raise Corrupt(f"The books do not balance: {audit.imbalances[:3]}", where=str(folder))
        appended = _appended(folder / "ledger.jsonl")
        checked = _check_versions(found, self._engines, versions)
        rates = {joined: [_rate(appended, span) for span in spans] for joined, spans in self._spans.items()}
        say(f"samples/s without: {_shown(rates[False])}; with: {_shown(rates[True])}")
        options = self._options
        settings = {"gym_concurrency": options.concurrency, "environment_s": options.latency,
                    "window_s": options.window, "cycles": options.cycles,
                    "joined": "2 gym workers, 1 engine"}  # fmt: skip
        train = next(book for book in audit.books if book.book == "train")
        extra = {"without": rates[False], "with": rates[True], "balanced": True,
                 "trained": train.samples.trained, "trajectories_of_joined_engines": checked}  # fmt: skip
        value, baseline = statistics.median(rates[True]), statistics.median(rates[False])
        name = "the same run before, between and after"
        return Claim("elastic", value, baseline, "samples/s", name, settings, BAR, extra)


def _start(command: list[str], environment: dict[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """A process that ends with us."""
    out = subprocess.DEVNULL if log is None else log
    return subprocess.Popen(spawn.wrap(command), env=environment, stdout=out, stderr=out)


def _appended(ledger: Path) -> list[int]:
    """When each training sample was handed in (ns); raises Corrupt when a group got more than it has."""
    times: list[int] = []
    by_group: Counter[int] = Counter()
    size: dict[int, int] = {}
    with ledger.open() as lines:
        for line in lines:
            event = json.loads(line).get("event")
            if event is None or event["book"] != "train":
                continue
            if event["kind"] == "dispatch":
                size[event["group"]] = event["samples"]
            if event["kind"] == "append":
                times.append(event["at_ns"])
                by_group[event["group"]] += 1
    doubled = [group for group, count in by_group.items() if count > size[group]]
    if doubled:
        raise Corrupt(f"Samples of {len(doubled)} groups were handed in twice", where=str(ledger))
    return times


def _rate(times: Sequence[int], span: tuple[float, float]) -> float:
    began, ended = (edge * 1e9 for edge in span)
    return sum(began <= at < ended for at in times) / (span[1] - span[0])


def _check_versions(found: Sequence[Trajectory], engines: set[str], versions: dict[int, int]) -> int:
    """Trajectories that a joined engine answered; raises Corrupt for a version not committed by then."""
    joined = [each for each in found if each.engine in engines]
    for each in joined:
        for version in each.policy_versions:
            committed = versions.get(version.number)
            after = each.timing.environment_s + each.timing.reward_s
            if committed is None or committed > each.timing.ended_ns - round(after * 1e9):
                raise Corrupt(f"{each.engine} answered at version {version.number} before its commit")
    if not joined:
        raise Corrupt("The joined engines answered nothing", do="Use a longer --window.")
    return len(joined)


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.1f}" for rate in rates)
