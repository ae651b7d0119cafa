"""Entry point of ``headrace serve rollout``: the router."""

from __future__ import annotations

from rollout_svc.router.app import Router
from rollout_svc.settings import RouterSettings
from services.runtime.service import serve


def main() -> int:
    """Serve until told to stop; the exit status."""
    settings = RouterSettings.load()
    return serve(Router(settings), settings)


if __name__ == "__main__":
    raise SystemExit(main())
