"""Methods that vLLM's worker gains (``worker_extension_cls``), called through ``collective_rpc``.

Invariants: arguments and results are plain JSON-like values; names start with ``headrace_`` so that they
cannot collide with the worker's own.
"""

from __future__ import annotations

from typing import Any

from refit_bridge.plan import TensorSpec
from refit_bridge.receiver.plugin import register
from services.runtime.errors import Refused

register()


class RefitExtension:
    """Mixed into vLLM's worker."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def headrace_begin_update(self, generation: int, plan: list[dict[str, Any]]) -> int:
        """Announce an update before ``start_weight_update``; returns the number of tensors in the plan.

        ``plan``: dicts of name, dtype and shape. A newer generation abandons an unfinished update; an older
        one raises Fenced.
        """
        specs = [
            TensorSpec(str(row["name"]), str(row["dtype"]), tuple(int(n) for n in row["shape"]))
            for row in plan
        ]
        self._engine().begin(generation, specs)
        # vLLM refuses to start while it believes an update is active, even one that failed in finish.
        self._weight_update_active = False
        return len(specs)

    def headrace_refit_report(self) -> dict[str, Any]:
        """The image check of the last finished update.

        ``checked`` (number of tensors), ``failures`` and ``unchecked`` (lists of {name, detail}).
        """
        report = self._engine().report
        if report is None:
            raise Refused("No weight update has finished", where="engine", do="Finish an update first.")
        result: dict[str, Any] = report.to_dict()
        return result

    def _engine(self) -> Any:
        engine = getattr(self, "weight_transfer_engine", None)
        if not hasattr(engine, "begin"):
            raise Refused(
                "This engine was started without the headrace backend",
                where="engine",
                do='Set weight_transfer_config={"backend": "headrace"}.',
            )
        return engine
