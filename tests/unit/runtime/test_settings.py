"""Settings are typed, prefixed per service, and a typo is never ignored."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.runtime.errors import InvalidInput
from services.runtime.settings import ServiceSettings, service_config


class GymSettings(ServiceSettings):
    model_config = service_config("gym")
    workers: int = 2


def test_environment_and_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_GYM_WORKERS", "5")
    monkeypatch.setenv("HEADRACE_GYM_LOG_LEVEL", "DEBUG")
    found = GymSettings.load(listen="127.0.0.1:7002", ready_file=None)
    assert (found.workers, found.log_level, found.listen) == (5, "debug", "127.0.0.1:7002")
    assert found.paths.redis == tmp_path / "redis"


def test_unknown_key_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GYM_WORKRES", "5")
    monkeypatch.setenv("HEADRACE_BUFFER_ANYTHING", "is another service's business")
    with pytest.raises(InvalidInput, match=r"HEADRACE_GYM_WORKRES.*HEADRACE_GYM_WORKERS") as caught:
        GymSettings.load()
    assert "\n" not in str(caught.value)


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"workrs.*Did you mean workers"):
        GymSettings.load(workrs=3)


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "192.168.1.2:7000", "example.org:1", "[::]:7000"])
def test_listening_off_loopback_needs_a_token(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"HEADRACE_TOKEN.*HEADRACE_GYM_LISTEN") as caught:
        GymSettings.load(listen=listen)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HEADRACE_TOKEN", "a token of good length")
    with pytest.raises(InvalidInput, match="without spaces"):
        GymSettings.load(listen=listen)
    monkeypatch.setenv("HEADRACE_TOKEN", "a-token-of-good-length")
    assert GymSettings.load(listen=listen).listen == listen


def test_a_wildcard_is_advertised_under_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "a-token-of-good-length")
    settings = GymSettings.load(listen="0.0.0.0:7002")
    assert settings.reachable("0.0.0.0:7002") == f"{socket.gethostname()}:7002"
    assert settings.reachable("[::]:41") == f"{socket.gethostname()}:41"
    assert settings.reachable("10.0.0.3:7002") == "10.0.0.3:7002"
    named = GymSettings.load(listen="0.0.0.0:7002", advertise="gym-3.gyms")
    assert named.reachable("0.0.0.0:9") == "gym-3.gyms:9"


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", ":7000", "127.0.0.1:70000"])
def test_malformed_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInput, match="HEADRACE_GYM_LISTEN"):
        GymSettings.load(listen=listen)


def test_wrong_type_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GYM_WORKERS", "many")
    with pytest.raises(InvalidInput, match="HEADRACE_GYM_WORKERS"):
        GymSettings.load()
