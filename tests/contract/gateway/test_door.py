"""Who may call the gateway, and how it goes: the token, other origins, SIGTERM."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.contract.serving import serving

from .conftest import gateway  # noqa: TID252 (tests are no package)

SECRET = "92d1f0aa77c34be1-gateway"
pytestmark = pytest.mark.timeout(60)


async def test_with_a_token_everything_but_the_probes_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    async with gateway(tmp_path) as (base, _), httpx.AsyncClient(base_url=base) as http:
        assert (await http.get("/healthz")).status_code == 200
        for path in ("/api/v1/runs", "/api/v1/openapi.json", "/metrics", "/nowhere"):
            for sent in ({}, {"Authorization": f"Bearer {SECRET}x"}, {"Authorization": f"Basic {SECRET}"}):
                answer = await http.get(path, headers=sent)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.json()["reason"] == "UNAUTHENTICATED"
                assert SECRET not in answer.text
        right = {"Authorization": f"Bearer {SECRET}"}
        schema = (await http.get("/api/v1/openapi.json", headers=right)).json()
        assert schema["security"] == [{"bearer": []}]
        assert "headrace_gateway" in (await http.get("/metrics", headers=right)).text


async def test_other_origins_are_let_in_by_name_only(tmp_path: Path) -> None:
    page = {"Origin": "https://board.example", "Access-Control-Request-Method": "GET"}
    async with gateway(tmp_path) as (base, _), httpx.AsyncClient(base_url=base) as http:
        assert "access-control-allow-origin" not in (await http.get("/healthz", headers=page)).headers
    named = gateway(tmp_path, cors_origins="https://board.example")
    async with named as (base, _), httpx.AsyncClient(base_url=base) as http:
        asked = await http.options("/api/v1/runs", headers=page)
        assert asked.headers["access-control-allow-origin"] == "https://board.example"
        other = await http.options("/api/v1/runs", headers={**page, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_it_is_served_like_every_service_and_drains(tmp_path: Path) -> None:
    with serving("gateway", tmp_path, 30) as served:
        print(f"ready in {served.seconds:.2f} s, {served.cpu_s:.2f} s of CPU")
        assert httpx.get(f"http://{served.address}/healthz").status_code == 200
        assert httpx.get(f"http://{served.address}/readyz").status_code == 503
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(15) == 0, served.log.read_text()
        events = [json.loads(line)["event"] for line in served.log.read_text().splitlines()]
    assert events[-1] == "stopped"
    assert not (tmp_path / "ready.json").exists()
