"""Headrace from Python: :class:`Client` (blocking) and :class:`AsyncClient` over the controller's ``Runs``.

with Client("127.0.0.1:7000") as client:
    run = client.submit("recipes/tiny/arithmetic.yaml", ["grpo.seed=1"])
    for event in client.watch(run.run):
        print(event.kind, event.step, dict(event.values))
"""

from services.client.asynchronous import AsyncClient, RecipeLike
from services.client.blocking import Client

__all__ = ["AsyncClient", "Client", "RecipeLike"]
